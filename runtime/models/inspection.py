"""What `inspect` tells of a model: a list of inspections, each from headers, config and tokenizer alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..engines import ENGINES, settle
from ..errors import ModelLoadFailed, ResidentError
from ..request import ModelSpec, Prompt
from .info import ModelInfo, read_model

Facts = dict[str, object]

KV_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "q8": 8.5, "q6": 6.5, "q4": 4.5}
"""Bits that one cached value takes, scales included."""

SHOWN = ("fp32", "fp16", "q8", "q6", "q4")


def inspect(path: str) -> dict[str, object]:
    """All facts about the model at `path`, by inspection; JSON values only.

    `awq` is one word (genuine, damaged, not_awq), and `awq_report` says why. Raises what `read_model` raises, but
    for a damaged AWQ folder, which gives only its verdict and the `fault`.
    """
    verdict = awq(path)
    try:
        info = read_model(path)
    except ModelLoadFailed as error:
        if verdict["awq"] != "damaged":
            raise
        return {"fault": str(error), **verdict}
    return {**{name: look(info) for name, look in INSPECTIONS.items()}, **verdict}


def awq(path: str) -> Facts:
    """Whether a folder holds 4-bit AWQ weights that are whole."""
    if not Path(path).is_dir():
        return {"awq": "not_awq", "awq_report": {"reason": "This is no folder."}}
    from .awq import inspect_awq

    report = inspect_awq(path).as_dict()
    return {"awq": report.pop("awq"), "awq_report": report}


def model(info: ModelInfo) -> Facts:
    """What it is."""
    return {
        "path": info.path,
        "format": info.format,
        "architecture": info.architecture,
        "model_type": info.model_type,
        "dtype": info.dtype or None,
        "quant_method": info.quant_method,
        "context_len": info.context_len,
        "num_layers": info.num_layers,
        "vocab_size": info.vocab_size,
    }


def weights(info: ModelInfo) -> Facts:
    """Its bytes as stored, by the type of the tensors."""
    by_dtype: Counter[str] = Counter()
    for header in info.tensors.values():
        by_dtype[header.dtype] += header.nbytes
    return {
        "num_tensors": len(info.tensors),
        "weights_bytes": info.weights_bytes,
        "bytes_by_dtype": dict(by_dtype.most_common()),
    }


def kv_cache(info: ModelInfo) -> Facts:
    """What a token costs in the KV cache, by precision, and the fp32 state of a sequence, whatever its length."""
    kv = info.kv
    per_token = {name: round(kv.elements_per_token * KV_BITS[name] / 8) for name in SHOWN}
    full = {name: num_bytes * info.context_len for name, num_bytes in per_token.items()} if info.context_len else None
    return {
        "num_layers": kv.num_layers,
        "num_heads": kv.num_heads,
        "key_dim": kv.key_dim,
        "value_dim": kv.value_dim,
        "bytes_per_token": per_token,
        "bytes_at_full_context": full,
        "state_bytes": 4 * (kv.state_elements + kv.conv_elements),
    }


def here(info: ModelInfo) -> Facts:
    """What would run it on this machine with every setting on auto, and what a token then costs in the KV cache."""
    try:
        spec = settle(ModelSpec(model=info.path))
    except ResidentError:
        return {"engine": None}
    per_token = round(info.kv.elements_per_token * KV_BITS[spec.kv_cache] / 8)
    return {
        "engine": spec.engine,
        "device": spec.device,
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "kv_cache": spec.kv_cache,
        "context_len": spec.context_len,
        "bytes_per_token": per_token,
        "kv_cache_bytes": per_token * (spec.context_len or 0),
    }


def tokenizer(info: ModelInfo) -> Facts:
    """Its tokenizer and chat template: whether a message can be rendered, and what ends an answer.

    A GGUF file's header tells it all; building its tokenizer would take seconds and tell no more.
    """
    from ..prompting.prompter import Prompter

    try:
        prompter = Prompter.of_header(info.path) if info.format == "gguf" else Prompter.load(info.path)
        encoded = prompter.encode(Prompt.of("Hello"))
    except ResidentError as error:
        return {"fault": str(error)}
    except ImportError as error:
        return {"fault": f"the package {error.name} is not installed"}
    return {
        "fault": None,
        "num_ids": prompter.vocab_size,
        "fits_head": prompter.vocab_size <= info.vocab_size,
        "stop": [{"id": one.id, "text": one.text, "source": one.source} for one in encoded.stop],
        "thinking_tags": None
        if encoded.reasoning is None
        else [encoded.reasoning.open_tag, encoded.reasoning.close_tag],
        "example": encoded.text,
    }


def engines(info: ModelInfo) -> Facts:
    """Why each engine that reads model files cannot run it here; None for those that can."""
    return {row.name: row.why_not(info) for row in ENGINES if row.formats}


INSPECTIONS: dict[str, Callable[[ModelInfo], Facts]] = {
    "model": model,
    "weights": weights,
    "kv_cache": kv_cache,
    "here": here,
    "tokenizer": tokenizer,
    "engines": engines,
}
