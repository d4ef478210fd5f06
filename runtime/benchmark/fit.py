"""Which context fits which card, and this machine, from the model's headers: computed, and never called measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..device_memory import read as read_memory
from ..models.footprint import weights_bytes
from ..models.info import ModelInfo
from ..models.inspection import here
from ..telemetry import format_bytes
from .ceiling import BANDWIDTHS, bytes_per_step, ceiling_tokens_per_s, kv_bytes_per_token

CARDS_GB = (8, 12, 16, 24, 32, 48, 80)
KV_CACHES = ("fp16", "q8", "q4")
RESERVED_BYTES = 1.2e9
"""What CUDA, the desktop and the host keep for themselves: 0.8 GiB of inference memory and 0.4 GB of reserve."""
SCRATCH_BYTES = 0.3e9


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The longest context on one card with one KV precision, in tokens; 0 where the weights alone do not fit."""

    card_gb: int
    kv_cache: str
    context_len: int


def fits(info: ModelInfo, *, beside_bytes: float = 0, cards_gb: Sequence[int] = CARDS_GB) -> list[Fit]:
    """For each card and precision the longest context beside `beside_bytes` of another model."""
    found = []
    for card_gb in cards_gb:
        for kv_cache in KV_CACHES:
            left = card_gb * 1e9 - RESERVED_BYTES - SCRATCH_BYTES - beside_bytes - info.weights_bytes
            per_token = kv_bytes_per_token(info, kv_cache)
            most = int(left / per_token) if left > 0 and per_token else 0
            length = min(most, info.context_len or most)
            found.append(Fit(card_gb=card_gb, kv_cache=kv_cache, context_len=max(0, length) // 256 * 256))
    return found


def ceilings(info: ModelInfo, *, num_tokens: int) -> dict[str, float]:
    """By the datasheet bandwidth of common cards: most decode tok/s with `num_tokens` in an fp16 cache."""
    step = bytes_per_step(info, weights_bytes=info.weights_bytes, kv_cache="fp16", num_tokens=num_tokens)
    return {card: ceiling_tokens_per_s(bandwidth, step) for card, bandwidth in BANDWIDTHS.items()}


def fits_here(info: ModelInfo) -> dict[str, object] | None:
    """What would run the model on this machine, with its own types, and the longest context in the memory now free.

    None where nothing can run it, or where the free memory is not known.
    """
    facts = here(info)
    memory = read_memory(str(facts["device"])) if facts["engine"] else None
    if memory is None:
        return None
    weights = weights_bytes(info, str(facts["dtype"])) if facts["dtype"] else info.weights_bytes
    per_token, left = int(str(facts["bytes_per_token"])), memory.free - weights
    most = left // per_token if left > 0 and per_token else 0
    return {
        **{name: facts[name] for name in ("engine", "device", "dtype", "kv_cache", "bytes_per_token")},
        "free_bytes": memory.free,
        "weights_bytes": weights,
        "context_len": min(most, info.context_len or most),
    }


def _line_of(found: dict[str, object]) -> str:
    weights, free = format_bytes(int(str(found["weights_bytes"]))), format_bytes(int(str(found["free_bytes"])))
    in_type = f" in {found['dtype']}" if found["dtype"] else ""
    return (
        f"This machine: {found['engine']} on {found['device']}{in_type} takes {weights} of weights and "
        f"{found['bytes_per_token']} bytes a token of {found['kv_cache']} KV cache: {found['context_len'] or 'no'} "
        f"tokens fit into the {free} that are free now."
    )


def fit_table(info: ModelInfo, *, beside_bytes: float = 0, num_tokens: int = 2048) -> str:
    """Both as text."""
    rows, found = fits(info, beside_bytes=beside_bytes), fits_here(info)
    beside = f" beside {beside_bytes / 1e9:.1f} GB of another model" if beside_bytes else ""
    lines = [
        f"Computed, not measured: {info.weights_bytes / 1e9:.2f} GB of weights as stored{beside}.",
        "",
        "card    " + "".join(f"{f'KV {kv}':>12}" for kv in KV_CACHES) + "   (longest context in tokens)",
    ]
    for card_gb in CARDS_GB:
        cells = [one.context_len for one in rows if one.card_gb == card_gb]
        lines.append(f"{card_gb:>3} GB  " + "".join(f"{cell or 'no':>12}" for cell in cells))
    if found is not None:
        lines += ["", _line_of(found)]
    lines += ["", f"ceiling of decoding at {num_tokens} tokens (datasheet bandwidth / bytes read per token):"]
    lines += [f"  {card:14} {rate:7.0f} tok/s" for card, rate in ceilings(info, num_tokens=num_tokens).items()]
    return "\n".join(lines)
