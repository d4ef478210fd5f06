"""Which attention runs: chosen by name, and trusted only after its numbers were compared."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelUnsupported

NAMES = ("auto", "sdpa", "flash_attention_2", "eager")
LARGEST_ERROR = 0.02
"""Largest difference of outputs (of unit-normal inputs) from the fp32 reference that 16-bit kernels may show."""


def choose_attention(wanted: str, model_class: Any, device: torch.device, dtype: torch.dtype) -> tuple[str, str | None]:
    """(the attention to load with, a warning if it is not the one that was asked for).

    Never a name that transformers would fetch from a hub.
    """
    if wanted not in NAMES:
        raise ModelUnsupported(f"attention is {wanted!r}; the transformers engine has {', '.join(NAMES)}.")
    fallback = "sdpa" if model_class._supports_sdpa else "eager"
    if wanted == "auto":
        return fallback, None
    if wanted == "flash_attention_2":
        fault = why_no_flash_attention(device, dtype)
        if fault is None and not _supports_flash(model_class):
            fault = f"{model_class.__name__} has no support for it"
        return (
            (wanted, None) if fault is None else (fallback, f"flash_attention_2 is not used: {fault}. {fallback} runs.")
        )
    if wanted == "sdpa" and fallback != "sdpa":
        return fallback, f"sdpa is not used: {model_class.__name__} has no support for it. {fallback} runs."
    return wanted, None


def _supports_flash(model_class: Any) -> bool:
    return bool(
        getattr(model_class, "_supports_flash_attn", False) or getattr(model_class, "_supports_flash_attn_2", False)
    )


def why_no_flash_attention(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the installed flash-attn computes right numbers here, else the reason.

    Being importable proves nothing: a build for another torch imports and computes nonsense, or crashes in its
    first call.
    """
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it needs fp16 or bf16, and this is {str(dtype).removeprefix('torch.')}"
    try:
        from flash_attn import flash_attn_func
    except Exception as error:
        return f"flash-attn cannot be imported ({type(error).__name__}: {error})"
    try:
        error_size = flash_error(flash_attn_func, device, dtype)
    except Exception as error:
        return f"flash-attn failed in a trial ({type(error).__name__}: {error})"
    if not error_size <= LARGEST_ERROR:
        return f"flash-attn computed wrong numbers in a trial (off by {error_size:.3g})"
    return None


def flash_error(flash_attn_func: Any, device: torch.device, dtype: torch.dtype) -> float:
    """Largest difference of causal grouped attention, prefill and one decode step, from an fp32 reference."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    query = torch.randn(1, 96, 8, 64, generator=generator).to(device, dtype)
    key, value = (torch.randn(1, 96, 2, 64, generator=generator).to(device, dtype) for _ in range(2))
    wanted = reference_attention(query, key, value)
    errors = (
        flash_attn_func(query, key, value, causal=True).float() - wanted,
        flash_attn_func(query[:, -1:], key, value, causal=True).float() - wanted[:, -1:],
    )
    return max(float(error.abs().max()) for error in errors)


def reference_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention [batch, tokens, heads, head_dim] in fp32, by its definition."""
    groups = query.shape[2] // key.shape[2]
    q = query.float().transpose(1, 2)
    k, v = (one.float().repeat_interleave(groups, dim=2).transpose(1, 2) for one in (key, value))
    scores = torch.matmul(q, k.transpose(-1, -2)) / query.shape[-1] ** 0.5
    is_later = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
    shares = scores.masked_fill(is_later, float("-inf")).softmax(-1)
    return torch.matmul(shares, v).transpose(1, 2)
