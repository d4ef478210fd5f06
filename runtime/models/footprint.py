"""Bytes that a model will need, computed from headers and config before anything is loaded."""

from __future__ import annotations

from ..telemetry import Bytes
from .info import ModelInfo, text_config
from .safetensors_header import TensorHeader

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FLOATS = ("F64", "F32", "F16", "BF16")
FP32_STATE_BYTES = 4
UNUSED = ("mtp.", "model.mtp.", "visual.", "model.visual.", "vision_tower.", "model.vision_tower.")
"""Stored tensors that a text class does not load: drafting heads and eyes."""


def weights_bytes(info: ModelInfo, dtype: str) -> int:
    """Bytes of the loaded weights in `dtype`, those that stay packed as they are stored."""
    used = {name: header for name, header in info.tensors.items() if not name.startswith(UNUSED)}
    text = text_config(info.config)
    is_tied = text.get("tie_word_embeddings", info.config.get("tie_word_embeddings", False))
    if is_tied and any("embed_tokens" in name for name in used):
        used = {name: header for name, header in used.items() if not name.endswith("lm_head.weight")}
    return sum(_loaded_bytes(info, header, dtype) for header in used.values())


def _loaded_bytes(info: ModelInfo, header: TensorHeader, dtype: str) -> int:
    if info.format == "gguf" or header.dtype in FLOATS:
        return header.num_elements * ITEM_BYTES[dtype]
    return header.nbytes


def kv_bytes(info: ModelInfo, context_len: int, kv_dtype: str, dtype: str) -> int:
    """Bytes of a preallocated cache for one sequence: keys and values, and the state of recurrent layers."""
    kv = info.kv
    state = kv.state_elements * FP32_STATE_BYTES + kv.conv_elements * ITEM_BYTES[dtype]
    return kv.elements_per_token * context_len * ITEM_BYTES[kv_dtype] + state


def footprint(info: ModelInfo, *, context_len: int, dtype: str, kv_dtype: str) -> Bytes:
    """Weights and KV cache of one sequence of `context_len` tokens."""
    return Bytes(weights=weights_bytes(info, dtype), kv_cache=kv_bytes(info, context_len, kv_dtype, dtype))
