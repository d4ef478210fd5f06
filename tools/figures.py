"""Measured figures for README, from the results that a GPU run left under bench/results; nothing is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"

Rows = list[tuple[str, str]]


def _read(pattern: str) -> list[Any]:
    """All results of that kind, those with the most facts first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob(pattern))]
    return sorted(found, key=len, reverse=True)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"


def residency() -> tuple[str, Rows] | None:
    """(conditions, rows) of stepping aside, coming back, and reused prefixes; None where nothing was measured."""
    runs = [one for one in _read("*residency*.json") if not one.get("is_tiny")]
    if not runs:
        return None
    whole = next((one for one in runs if _has_ends(one)), runs[0])
    machine, size = whole["machine"], whole.get("model", {}).get("bytes")
    about = f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}, {machine['date']}"
    if size:
        about += f", {size / 1e9:.1f} GB bf16"
    cycles = next((one["cycles"] for one in runs if one.get("cycles")), None)
    return about, [*_residency_rows(whole), *(_cycle_rows(cycles) if cycles else ())]


def _has_ends(run: dict[str, Any]) -> bool:
    """Whether the same prompt again, and other ends, were measured apart."""
    return any("same_again_ttft_s" in row for row in run.get("prefix_reuse", []))


def _residency_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    first, second, bus = (found.get(name) or {} for name in ("first_eviction", "second_eviction", "bus"))
    weights = found.get("first_load", {}).get("bytes_counted", {}).get("weights")
    if first:
        yield "steps aside the first time, which page-locks host memory for its copy", _seconds(first["evict_s"])
    if second:
        yield "steps aside from then on", _seconds(second["evict_s"])
        yield "comes back from host memory", _seconds(second["return_s"])
    if second and weights:
        yield "that return: weights over time", f"{weights / second['return_s'] / 1e9:.1f} GB/s"
    if bus:
        yield "the bus itself, pinned memory to the device", f"{bus['pinned_to_device_gb_per_s']:.1f} GB/s"
    for key, what in (
        ("return_from_page_cache", "loads again from files in the page cache"),
        ("return_from_disk", "loads again from disk"),
    ):
        if key in found:
            yield what, _seconds(found[key]["return_s"])
    for row in found.get("prefix_reuse", []):
        if "same_again_ttft_s" in row:
            figure = " / ".join(_seconds(row[f"{name}_ttft_s"]) for name in ("cold", "same_again", "other_end"))
            yield f"TTFT, {row['num_prompt_tokens']} tokens: new / same again / same beginning", figure


def _cycle_rows(cycles: dict[str, Any]) -> Iterator[tuple[str, str]]:
    away, back = _seconds(cycles["evict_s_median"]), _seconds(cycles["return_s_median"])
    yield f"{cycles['num_cycles']} cycles, median: away / back", f"{away} / {back}"
    spread = cycles["free_bytes_spread"] / 1e6
    yield "free device memory after each cycle, largest less smallest", f"{spread:.0f} MB"


def exllamav2() -> tuple[str, Rows] | None:
    """(conditions, rows) of tokens per second, with the bare SDK and the ceiling of the same run beside them."""
    for found in _read("*exllamav2*.json"):
        of_kind = {kind: [row for row in found if row.get("kind") == kind] for kind in (*KINDS, "device", "start")}
        if of_kind["decode"]:
            device, start = of_kind["device"], of_kind["start"]
            about = f"{device[0]['name'] if device else 'GPU'}, torch {start[0]['torch'] if start else '?'}"
            return f"{about}, ExLlamaV2 0.3.2, 26.9 B AWQ 4 bit", list(_speeds(of_kind))
    return None


KINDS = ("decode", "eight-at-once", "warm-prefix", "transformers-bf16")


def _speeds(of_kind: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, str]]:
    for row in of_kind["decode"]:
        what = f"decode tok/s, {row['prompt']} tokens, KV {row['kv_cache']}: here / bare ExLlamaV2 / ceiling"
        yield (
            what,
            " / ".join(f"{row[key]:.0f}" for key in ("tokens_per_s", "bare_tokens_per_s", "ceiling_tokens_per_s")),
        )
    for row in of_kind["eight-at-once"]:
        what = f"tok/s of a list of 8, 512 tokens each, KV {row['kv_cache']}: here / bare ExLlamaV2"
        yield what, f"{row['tokens_per_s']:.0f} / {row['bare_tokens_per_s']:.0f}"
    for row in of_kind["warm-prefix"]:
        what = f"TTFT, {row['prompt']} tokens, KV {row['kv_cache']}: new / same again"
        yield what, f"{_seconds(row['cold_ttft_s'])} / {_seconds(row['ttft_s'])}"
    for row in of_kind["transformers-bf16"]:
        what = f"transformers bf16, {row['cache']} cache, same shape, {row['prompt']} tokens: decode tok/s"
        yield what, f"{row['tokens_per_s']:.0f}"


def through_the_node() -> tuple[str, Rows] | None:
    """(conditions, rows) of what is left, through the node, of a bare loop's or a bare HTTP client's speed."""
    lines = [*_lines("cpu-node-overhead")[-1:], *_lines("cpu-servers")]
    rows = [json.loads(line) for line in lines]
    measured = [row for row in rows if "ratio" in row]
    if not measured:
        return None
    return f"{measured[-1]['machine']} CPU, the node in a real ComfyUI, turn by turn", [*map(_share, measured)]


def _lines(name: str) -> list[str]:
    file = RESULTS / f"{name}.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _share(row: dict[str, Any]) -> tuple[str, str]:
    what = f"{row['server']}, {row['concurrent']} at once" if "server" in row else "transformers"
    beside = "bare HTTP client" if "server" in row else "bare loop"
    return f"{what}: speed through the node / {beside}, median of {len(row['ratios'])}", f"{row['ratio']:.3f}"
