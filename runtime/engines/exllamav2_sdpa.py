"""ExLlamaV2 0.2.9 to 0.3.2 without flash-attn: attention through torch's SDPA sees the future.

Its torch branch takes the mask of block-diagonal layers for every causal layer; text models have none, so SDPA
runs without a mask and a prompt attends to its own later tokens (exllamav2-0.3.2:exllamav2/attn.py
`ExLlamaV2Attention._attn_torch`). The patch hands that call parameters whose block-diagonal mask is the causal one.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from ..patches import Patch, Undo


class _CausalMask:
    """Attention parameters, whose block-diagonal mask is the causal one for this call."""

    def __init__(self, params: Any, q_len: int, k_len: int) -> None:
        self._params = params
        self._lengths = (q_len, k_len)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._params, name)

    def get_block_diag_mask(self, device: Any) -> Any:
        if not self._params.is_causal():
            return self._params.get_attn_mask(device)
        bias = importlib.import_module("torch.nn.attention.bias")
        return bias.causal_lower_right(*self._lengths)


def apply() -> Undo:
    attention = importlib.import_module("exllamav2.attn").ExLlamaV2Attention
    original = attention._attn_torch

    def _attn_torch(
        self: Any, batch_size: int, q_len: int, q: Any, k: Any, v: Any, params: Any, cfg: Any, causal: bool = True
    ) -> Any:
        is_sdpa = not (cfg.no_sdpa or cfg.attn_logit_softcapping)
        if causal and is_sdpa and self.layer_idx not in params.block_diag_layers:
            window = self.sliding_window
            params = _CausalMask(params, q_len, min(k.shape[1], window) if window else k.shape[1])
        return original(self, batch_size, q_len, q, k, v, params, cfg, causal)

    attention._attn_torch = _attn_torch

    def undo() -> None:
        attention._attn_torch = original

    return undo


def is_faulty() -> bool:
    """Whether changing the last key and value changes the output of an earlier query: 6 tokens, 2 heads, fp32."""
    torch: Any = importlib.import_module("torch")
    attention = importlib.import_module("exllamav2.attn").ExLlamaV2Attention
    layer = SimpleNamespace(
        num_key_value_groups=1, sliding_window=0, layer_idx=0, scaling=0.5, repeat_kv=lambda states, _: states
    )
    cfg = SimpleNamespace(no_sdpa=False, attn_logit_softcapping=None)
    params = SimpleNamespace(
        block_diag_layers=set(),
        is_causal=lambda: True,
        get_block_diag_mask=lambda device: None,
        get_attn_mask=lambda device: None,
    )
    q, k, v = torch.randn(3, 1, 6, 2, 4, generator=torch.Generator().manual_seed(0))
    later_k, later_v = k.clone(), v.clone()
    later_k[:, -1] += 1
    later_v[:, -1] += 1
    with torch.inference_mode():
        before, after = (
            attention._attn_torch(layer, 1, 6, q, one_k, one_v, params, cfg).reshape(1, 6, -1)
            for one_k, one_v in ((k, v), (later_k, later_v))
        )
    return bool((before[:, :-1] - after[:, :-1]).abs().max() > 1e-4)


PATCH = Patch(
    id="exllamav2-causal-sdpa",
    package="exllamav2",
    versions=("0.2.9", "0.3.2"),
    cures="without flash-attn a prompt attended to its own later tokens",
    is_faulty=is_faulty,
    apply=apply,
)
