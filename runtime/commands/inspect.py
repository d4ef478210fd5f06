"""Say what a model folder or file is, what it needs, and which engines can run it; no weights are loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from ..models.inspection import inspect
from ..telemetry import format_bytes

HELP = "Show what a model is, what memory it needs, and which engines can run it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder or a .gguf file")
    parser.add_argument("--json", action="store_true", help="print one object instead of lines")


def run(args: argparse.Namespace) -> int:
    facts: dict[str, Any] = inspect(args.model)
    print(json.dumps(facts) if args.json else "\n".join(f"{name:14} {text}" for name, text in _lines(facts)))
    return 0


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The facts for a reader."""
    if "fault" in facts:
        yield "cannot load", facts["fault"]
    else:
        yield from _model(facts["model"])
        yield from _weights(facts["weights"])
        yield from _kv_cache(facts["kv_cache"])
        yield from _here(facts["here"])
        yield from _tokenizer(facts["tokenizer"])
        yield from _engines(facts["engines"])
    if facts["awq"] != "not_awq":
        yield from _awq(facts["awq"], facts["awq_report"])


def _model(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", facts["path"]
    parts = (facts["format"], facts["architecture"], facts["dtype"], facts["quant_method"])
    yield "", ", ".join(part for part in parts if part) + f", {facts['num_layers']} layers"
    yield "context", f"{facts['context_len']} tokens" if facts["context_len"] else "its config names no limit"


def _weights(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    by_dtype = ", ".join(f"{name} {format_bytes(size)}" for name, size in facts["bytes_by_dtype"].items())
    yield "weights", f"{format_bytes(facts['weights_bytes'])} in {facts['num_tensors']} tensors: {by_dtype}"


def _kv_cache(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    geometry = f"{facts['num_layers']} layers x {facts['num_heads']} heads x {facts['key_dim']} + {facts['value_dim']}"
    yield "KV cache", geometry
    for name, size in facts["bytes_per_token"].items():
        full = facts["bytes_at_full_context"]
        yield "", f"{name:5} {size} bytes a token" + (f", {format_bytes(full[name])} at full context" if full else "")
    if facts["state_bytes"]:
        yield "", f"state of {format_bytes(facts['state_bytes'])} a sequence, whatever its length"


def _here(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if facts["engine"] is None:
        return
    in_type = f" in {facts['dtype']}" if facts["dtype"] else ""
    kept = f"{facts['context_len']} tokens, {format_bytes(facts['kv_cache_bytes'])} of {facts['kv_cache']} KV cache"
    yield "here", f"{facts['engine']} on {facts['device']}{in_type}: {kept}"


def _tokenizer(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if facts["fault"]:
        yield "tokenizer", f"cannot be used: {facts['fault']}"
        return
    fault = "" if facts["fits_head"] else ": more than the output head has rows"
    yield "tokenizer", f"{facts['num_ids']} ids{fault}"
    yield "stops at", ", ".join(f"{one['text']} ({one['id']}, {one['source']})" for one in facts["stop"]) or "nothing"
    if facts["thinking_tags"]:
        yield "thinking", " ... ".join(facts["thinking_tags"])


def _engines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for at, (name, reason) in enumerate(facts.items()):
        yield "" if at else "engines", f"{name:13} " + (f"no: {reason}" if reason else "yes")


def _awq(verdict: str, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "AWQ", f"{verdict}: {report['reason']}"
    for text in (*report["faults"], *report["notes"]):
        yield "", text
    for why in dict.fromkeys(one["why"] for one in report["modules_16bit"]):
        names = [one["name"] for one in report["modules_16bit"] if one["why"] == why]
        yield "", f"{len(names)} in 16 bit, {why}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
