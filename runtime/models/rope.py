"""How many positions a model was made for, by its config's rotary embedding (RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROWN = ("yarn", "dynamic")
"""Kinds whose config names the length before scaling; the others name the length after it."""


def context_len_of(config: Mapping[str, Any]) -> int | None:
    """Most positions that the (text) config allows; None if it says none.

    YaRN (Peng et al. 2023, arXiv:2309.00071) and dynamic NTK reach `factor` times the original length, but only
    where the config asks for them.

    >>> context_len_of({"max_position_embeddings": 32768})
    32768
    >>> yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> context_len_of({"max_position_embeddings": 40960, "rope_parameters": yarn})
    131072
    """
    named = next(
        (config[key] for key in ("max_position_embeddings", "n_positions", "seq_length") if config.get(key)), None
    )
    if named is None:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(scaling.get("full_attention"), Mapping):
        scaling = scaling["full_attention"]
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if kind not in GROWN or not factor:
        return int(named)
    original = scaling.get("original_max_position_embeddings") or named
    return max(int(named), int(original * factor))
