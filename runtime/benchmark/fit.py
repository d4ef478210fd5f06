"""Which context fits which card, computed from the model's headers: marked as computed, never as measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..models.info import ModelInfo
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


def fit_table(info: ModelInfo, *, beside_bytes: float = 0, num_tokens: int = 2048) -> str:
    """Both as text."""
    rows = fits(info, beside_bytes=beside_bytes)
    beside = f" beside {beside_bytes / 1e9:.1f} GB of another model" if beside_bytes else ""
    lines = [
        f"Computed, not measured: {info.weights_bytes / 1e9:.2f} GB of weights as stored{beside}.",
        "",
        "card    " + "".join(f"{f'KV {kv}':>12}" for kv in KV_CACHES) + "   (longest context in tokens)",
    ]
    for card_gb in CARDS_GB:
        cells = [one.context_len for one in rows if one.card_gb == card_gb]
        lines.append(f"{card_gb:>3} GB  " + "".join(f"{cell or 'no':>12}" for cell in cells))
    lines += ["", f"ceiling of decoding at {num_tokens} tokens (datasheet bandwidth / bytes read per token):"]
    lines += [f"  {card:14} {rate:7.0f} tok/s" for card, rate in ceilings(info, num_tokens=num_tokens).items()]
    return "\n".join(lines)
