"""How alike two models write: the same weights at another precision, or another KV cache, against the first one.

Greedy texts of 25 prompts are compared token for token; where an engine gives logits, a held-out text gives perplexity
and the Kullback-Leibler divergence from the first model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engines.base import Engine
from ..errors import ResidentError
from ..events import Event, Failed, Finished
from ..request import GREEDY, ModelSpec, Prompt, Request
from ..runtime import Runtime
from ..stream import stream
from .prompts import quality_prompts
from .rows import Row

NGRAM = 4
HELD_OUT = Path(__file__).parent / "heldout.txt"

TokenIds = tuple[int, ...]


@dataclass(kw_only=True)
class Written:
    """What one model wrote, by prompt, and what it says about the held-out text."""

    texts: list[str] = field(default_factory=list)
    error: str | None = None
    held_out: TokenIds = ()
    log_probs: Any = None


def measure_quality(
    specs: Sequence[ModelSpec], runtime: Runtime, *, output_tokens: int = 64
) -> Generator[Event, None, list[Row]]:
    """A row for each model, compared with the first of them; its figures are None where an engine gives no logits."""
    first: Written | None = None
    rows = []
    for spec in specs:
        try:
            lease = yield from runtime.leasing(spec)
            with lease as engine:
                written = yield from _write(engine, output_tokens)
                info = engine.info
                row: Row = {"model": info.model, "engine": info.engine, "dtype": info.dtype, "kv_cache": info.kv_cache}
        except ResidentError as error:
            written = Written(error=str(error))
            row = {"model": spec.model, "engine": spec.engine, "dtype": spec.dtype, "kv_cache": spec.kv_cache}
        first = first or written
        rows.append({**row, **compared(first, written), "output_tokens": output_tokens, "error": written.error})
    return rows


def _write(engine: Engine, output_tokens: int) -> Generator[Event, None, Written]:
    written = Written()
    for one in quality_prompts():
        request = Request(prompt=one.prompt, sampling=GREEDY, max_tokens=output_tokens, on_cut_thinking="thinking")
        with closing(stream(engine, [request])) as events:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    written.texts.append(event.raw_text)
                yield event
    logits = getattr(engine, "logits", None)
    if logits is not None and engine.info.capabilities.has_logits:
        written.held_out = engine.encode(Prompt.of(HELD_OUT.read_text(encoding="utf-8"))).token_ids or ()
        written.log_probs = logits(written.held_out).log_softmax(-1).cpu()
    return written


def compared(first: Written, other: Written) -> Row:
    """The figures of `other`.

    agreement:        share of the characters of the first model's texts up to where the two part
    num_equal_texts:  prompts with the same text to the end
    repetition_rate:  share of 4-word sequences that were written before in the same text
    perplexity:       of the held-out text inside the model's own chat template
    kl_mean, kl_max:  nats for each token of it, from the first model
    top1_agreement:   share of its tokens after which both find the same token most likely
    """
    pairs = list(zip(first.texts, other.texts))
    num_common = sum(common_prefix(a, b) for a, b in pairs)
    length = sum(max(len(a), len(b)) for a, b in pairs)
    return {
        "num_prompts": len(other.texts),
        "agreement": num_common / length if length else None,
        "num_equal_texts": sum(a == b for a, b in pairs),
        "repetition_rate": repetition_rate(other.texts),
        "perplexity": perplexity(other),
        **divergence(first, other),
    }


def common_prefix(a: str, b: str) -> int:
    """Characters up to where two texts part.

    >>> common_prefix("a cat", "a car")
    4
    """
    return next((at for at, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def repetition_rate(texts: Sequence[str]) -> float | None:
    """The share of 4-word sequences that came before in their text; None of texts without any.

    >>> repetition_rate(["a b c d a b c d"])
    0.2
    """
    num_all = num_new = 0
    for text in texts:
        words = text.split()
        found = Counter(tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1))
        num_all += sum(found.values())
        num_new += len(found)
    return (num_all - num_new) / num_all if num_all else None


def perplexity(one: Written) -> float | None:
    """e to the mean surprise at each token of the held-out text after the first."""
    if one.log_probs is None:
        return None
    told = one.log_probs[:-1].gather(-1, _tensor(one.held_out[1:])[:, None])
    return float((-told.mean()).exp())


def divergence(first: Written, other: Written) -> Row:
    """Kullback-Leibler divergence of `other` from `first` on the held-out text, where both have the same tokens."""
    unknown: Row = {"kl_mean": None, "kl_max": None, "top1_agreement": None}
    if first.log_probs is None or other.log_probs is None or first.held_out != other.held_out:
        return unknown
    width = min(first.log_probs.shape[-1], other.log_probs.shape[-1])  # rows of padding differ between formats
    p, q = first.log_probs[:, :width], other.log_probs[:, :width]
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    same = (p.argmax(-1) == q.argmax(-1)).float()
    return {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "top1_agreement": float(same.mean())}


def _tensor(ids: TokenIds) -> Any:
    import torch

    return torch.tensor(ids)
