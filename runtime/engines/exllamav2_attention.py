"""Which attention really runs under ExLlamaV2, and the proofs that it is right.

Without flash-attn, versions 0.2.9 to 0.3.2 take torch's SDPA with no mask: inside a prefill chunk every token then
sees the ones after it, and the text is wrong without an error (attn.py, `_attn_torch`). The patch of
exllamav2_sdpa.py gives it the mask; where that does not hold, `no_sdpa` takes the matrix-product branch beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import EngineUnavailable, GenerationFailed
from ..patches import Hold, registry
from .exllamav2_sdk import Sdk
from .exllamav2_sdpa import PATCH

PAGE = 256
"""Tokens of one page of the SDK's KV cache; cache and chunk lengths are multiples of it."""

FLASH = "flash_attention_2"
SDPA = "sdpa"
MATMUL = "eager"
NAMES = ("auto", FLASH, SDPA, MATMUL)
FLASH_TOLERANCE = 0.02
"""Largest difference from exact attention that fp16 explains, on inputs of unit variance."""

SCORE_BYTES = 512 * 1024**2
"""Most memory that the matrix-product branch may spend on the scores of one chunk."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What runs. why_not_flash: the reason, where flash-attn does not. hold: keeps the mask of SDPA in place."""

    name: str
    is_paged: bool = False
    why_not_flash: str | None = None
    hold: Hold | None = None


def choose(sdk: Sdk, asked: str, *, num_heads: int, num_kv_heads: int, head_dim: int, device: str) -> Attention:
    """flash-attn where it is there and computes right, else SDPA with its mask, else matrix products.

    Raises EngineUnavailable where the one that was asked for cannot run.
    """
    if asked not in NAMES:
        raise EngineUnavailable(f"ExLlamaV2 has no attention {asked!r}. Set attention to {', '.join(NAMES)}.")
    fault: str | None = "it was asked not to"
    if asked in ("auto", FLASH):
        fault = sdk.flash_fault or probe_flash(
            sdk.attention.flash_attn_with_kvcache,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=device,
        )
    if fault is None:
        return Attention(name=FLASH, is_paged=True)
    if asked == FLASH:
        raise EngineUnavailable(f"flash-attn was asked for, but {fault}. Set attention to auto, or repair it.")
    return without_flash(asked, fault)


def without_flash(asked: str, why: str) -> Attention:
    """SDPA where the patch of its mask holds and nothing else was asked for, else matrix products."""
    if asked != MATMUL:
        hold = registry().hold(PATCH.id)
        if hold.state.status == "applied":
            return Attention(name=SDPA, why_not_flash=why, hold=hold)
        hold.close()
        if asked == SDPA:
            raise EngineUnavailable(f"SDPA cannot be used under ExLlamaV2: patch {hold.state}. Set attention to auto.")
    return Attention(name=MATMUL, why_not_flash=why)


def probe_flash(attend: Any, *, num_heads: int, num_kv_heads: int, head_dim: int, device: str) -> str | None:
    """Why flash-attn's paged attention must not be used, from its numbers; None where it is right.

    Seven queries at the end of 300 keys that lie in two pages, in the wrong order.
    """
    source = torch.Generator().manual_seed(0)
    num_keys, num_queries = PAGE + 44, 7

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source).to(device=device, dtype=torch.float16)

    queries = draw(1, num_queries, num_heads, head_dim)
    keys, values = draw(2, PAGE, num_kv_heads, head_dim), draw(2, PAGE, num_kv_heads, head_dim)
    order = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    try:
        got = attend(
            q=queries,
            k_cache=keys,
            v_cache=values,
            cache_seqlens=torch.tensor([num_keys], dtype=torch.int32, device=device),
            block_table=order,
            causal=True,
            softmax_scale=head_dim**-0.5,
        )
    except Exception as error:
        return f"flash-attn fails on heads of {head_dim} ({type(error).__name__}: {error})"
    flat_keys, flat_values = (one[[1, 0]].flatten(0, 1)[:num_keys] for one in (keys, values))
    exact = _exact(queries[0], flat_keys, flat_values)
    worst = (got[0].float() - exact).abs().max().item()
    if not worst < FLASH_TOLERANCE:
        return f"flash-attn is {worst:.3g} off exact attention, more than {FLASH_TOLERANCE}"
    return None


def _exact(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[queries, heads, head_dim] in fp32, the last query seeing every key."""
    repeat = queries.shape[1] // keys.shape[1]
    keys, values = (one.float().repeat_interleave(repeat, dim=1).transpose(0, 1) for one in (keys, values))
    scores = queries.float().transpose(0, 1) @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(hidden.triu(scores.shape[2] - scores.shape[1] + 1), -math.inf)
    exact: torch.Tensor = scores.softmax(dim=-1) @ values
    return exact.transpose(0, 1)


def chunk_len(attention: Attention, *, num_heads: int, cache_len: int) -> int:
    """Prompt tokens of one prefill step: 2048, or what keeps the matrix-product scores within SCORE_BYTES.

    >>> chunk_len(Attention(name=MATMUL), num_heads=40, cache_len=32768)
    192
    """
    if attention.name != MATMUL:
        return min(2048, cache_len)
    fits = SCORE_BYTES // (num_heads * cache_len * 2) // 32 * 32
    return max(32, min(2048, cache_len, fits))


def probe_causality(model: Any, cache: Any, vocab_size: int) -> None:
    """Change a token inside a prefill chunk; no logits before it may move. Also refuses non-finite logits.

    Raises GenerationFailed with both sizes. The SDK's page table must be empty, or reset after this.
    """
    length, at = 64, 40
    ids = torch.randint(0, vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, at] = (ids[0, at] + 1) % vocab_size
    logits = []
    for one in (ids, other):
        cache.current_seq_len = 0
        logits.append(model.forward(one, cache)[..., :vocab_size].float().cpu())
    cache.current_seq_len = 0
    if not all(torch.isfinite(one).all() for one in logits):
        raise GenerationFailed("The first forward pass gave logits that are not finite. Try attention eager.")
    moved = (logits[0] - logits[1]).abs()[0]
    before, after = moved[:at].max().item(), moved[at:].max().item()
    if before > 0.1 * after:
        raise GenerationFailed(
            f"Attention is not causal: changing token {at} moved the logits before it by {before:.3g} (after it: "
            f"{after:.3g}). The text would be wrong. Set attention to {MATMUL}, and report the flash-attn version."
        )
