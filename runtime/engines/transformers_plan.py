"""What a spec comes to on this machine, decided before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..device_memory import read as read_memory
from ..errors import ModelUnsupported, OutOfMemory
from ..models import footprint as counted
from ..models.info import ModelInfo, read_model
from ..models.transformers_types import why_unknown
from ..request import ModelSpec
from ..telemetry import Bytes, format_bytes
from .precision import check as check_sums
from .torch_device import DTYPES, name_of, pick_device, pick_dtype

DEFAULT_CONTEXT_LEN = 32768
"""Context where the spec names none and the model allows more: a cache for all of it could fill the card."""

DEFAULT_PREFIX_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A load, settled.

    prefix_bytes: host memory for prefixes that are kept aside
    sums: how 16-bit matrix products add up, see precision.py
    """

    model: ModelInfo
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    context_len: int
    bytes: Bytes
    prefix_bytes: int
    sums: str
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        return Path(self.model.path).name


def plan(spec: ModelSpec) -> Plan:
    """Read the headers and settle device, types and context; raises a sentence for what cannot be."""
    info = read_model(spec.model)
    if reason := why_unknown(info):
        raise ModelUnsupported(f"{Path(info.path).name} cannot run with transformers: {reason}.")
    device = pick_device(spec.device)
    dtype, warning = pick_dtype(spec.dtype, info.dtype, device)
    kv_dtype = _kv_dtype(spec.kv_cache, dtype)
    context_len = _context_len(spec.context_len, info)
    num_bytes = counted.footprint(info, context_len=context_len, dtype=name_of(dtype), kv_dtype=name_of(kv_dtype))
    return Plan(
        model=info,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        context_len=context_len,
        bytes=num_bytes,
        sums=check_sums(spec.option("sums", "auto")),
        prefix_bytes=spec.whole_number("prefix_bytes", DEFAULT_PREFIX_BYTES),
        warnings=(warning,) if warning else (),
    )


def settle(spec: ModelSpec) -> ModelSpec:
    """The spec with device, types and context as they come out here."""
    made = plan(spec)
    return replace(
        spec,
        device=str(made.device),
        dtype=name_of(made.dtype),
        kv_cache=name_of(made.kv_dtype),
        context_len=made.context_len,
    )


def _kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return dtype
    if name not in DTYPES:
        raise ModelUnsupported(
            f"kv_cache {name!r} is not for the transformers engine, which has auto, {', '.join(DTYPES)}. "
            "A quantised KV cache needs the engine exllamav2 or llamacpp."
        )
    return DTYPES[name]


def _context_len(wanted: int | None, info: ModelInfo) -> int:
    limit = info.context_len
    if wanted is None:
        return min(limit or DEFAULT_CONTEXT_LEN, DEFAULT_CONTEXT_LEN)
    if limit is not None and wanted > limit:
        raise ModelUnsupported(
            f"context_len {wanted} is {wanted - limit} over the {limit} positions that {Path(info.path).name} was made "
            f"for by its config. Set context_len to {limit} or less, or leave it out."
        )
    return wanted


def check_gguf_fits(plan: Plan) -> None:
    """Raise OutOfMemory if the weights of a GGUF file, which grow when dequantised, do not fit the host's memory."""
    memory = read_memory("cpu")
    if memory is None or plan.bytes.weights <= memory.free:
        return
    raise OutOfMemory(
        f"{plan.name} has {format_bytes(plan.model.weights_bytes)}, and needs {format_bytes(plan.bytes.weights)} as "
        f"dequantised weights in {name_of(plan.dtype)}; {format_bytes(memory.free)} of memory are free. Choose a "
        "smaller model, or run the file with llama.cpp, which keeps it packed."
    )
