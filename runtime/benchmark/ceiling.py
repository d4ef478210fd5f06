"""The ceiling of decoding: memory bandwidth over the bytes that one step must read."""

from __future__ import annotations

from collections.abc import Mapping

from ..models.info import ModelInfo

KV_BITS = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "f16": 16.0, "q8": 8.5, "q6": 6.5, "q4": 4.5}
KV_BITS |= {"q8_0": 8.5, "q4_0": 4.5}
"""Bits of one cached element; quantised ones hold a 16-bit scale for each 32 elements; q6 is 8 (keys), 4 (values)."""

STATE_BYTES = 4
"""Of one element of a recurrent state, which is kept in fp32."""

EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight", "wte.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")


def embedding_share(info: ModelInfo) -> float:
    """The part of the stored weights that a step need not read: an input embedding that is not the output head too."""
    has_head = any(name.split(".", 1)[-1] in HEADS or name in HEADS for name in info.tensors)
    if not has_head or not info.weights_bytes:
        return 0.0
    stored = sum(header.nbytes for name, header in info.tensors.items() if name.endswith(EMBEDDINGS))
    return stored / info.weights_bytes


def kv_bytes_per_token(info: ModelInfo, kv_cache: str) -> float:
    """Bytes that one token leaves in the KV cache of all layers."""
    return info.kv.elements_per_token * KV_BITS.get(kv_cache, 16.0) / 8


def bytes_per_step(
    info: ModelInfo, *, weights_bytes: int, kv_cache: str, num_tokens: int, batch_size: int = 1
) -> float:
    """Bytes that one decode step must read at least: all weights once, and of each sequence its KV and its state.

    weights_bytes: as loaded, which may be wider than stored
    num_tokens:    tokens in the cache of each sequence
    """
    per_sequence = kv_bytes_per_token(info, kv_cache) * num_tokens + info.kv.state_elements * STATE_BYTES
    return weights_bytes * (1 - embedding_share(info)) + batch_size * per_sequence


def ceiling_tokens_per_s(bandwidth: float, step_bytes: float, batch_size: int = 1) -> float:
    """Most output tokens per second of all sequences together, without drafting.

    >>> round(ceiling_tokens_per_s(936e9, 15.2e9))
    62
    """
    return batch_size * bandwidth / step_bytes


BANDWIDTHS: Mapping[str, float] = {
    "RTX 3060 12 GB": 360e9,
    "RTX 4070 Ti": 504e9,
    "RTX 3090": 936e9,
    "RTX 4090": 1008e9,
    "RTX 5090": 1792e9,
    "A100 80 GB": 2039e9,
    "H100 SXM": 3350e9,
    "H200": 4800e9,
}
"""Datasheet bytes per second of common cards: a hint for the fit table, never for a measured row."""
