"""What to measure: models x KV precisions x prompt lengths x batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import InvalidValue
from ..request import KV_CACHES, ModelSpec

PAGE = 256
"""Context lengths are rounded up to this: paged engines demand it."""
MAX_CONTEXT, MAX_BATCH = 2**24, 4096
"""A digit too many must not fill the host's memory with words: prompts are written before an engine can refuse them."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row to be: every model of `specs` is measured in turn, A B A B, so that ratios are paired."""

    specs: tuple[ModelSpec, ...]
    num_prompt_tokens: int
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A benchmark as a value.

    contexts:      prompt lengths in tokens
    output_tokens: exactly so many are written for each request
    repeats:       counted runs of each cell, after `warmup` runs that are not counted
    has_checks:    run the sanity checks before a row counts
    """

    specs: tuple[ModelSpec, ...]
    contexts: tuple[int, ...] = (256, 1024)
    output_tokens: int = 64
    repeats: int = 3
    warmup: int = 1
    batch_sizes: tuple[int, ...] = (1,)
    kv_caches: tuple[str, ...] = ("auto",)
    has_checks: bool = False

    def __post_init__(self) -> None:
        for what, value, least in (
            ("models", len(self.specs), 1),
            ("contexts", min(self.contexts, default=0), 32),
            ("output_tokens", self.output_tokens, 4),
            ("repeats", self.repeats, 1),
            ("warmup", self.warmup, 0),
            ("batch", min(self.batch_sizes, default=0), 1),
            ("kv", len(self.kv_caches), 1),
        ):
            if value < least:
                raise InvalidValue(f"The benchmark's {what} is {value}; it starts at {least}.")
        for what, value, most in (
            ("contexts", max(self.contexts), MAX_CONTEXT),
            ("batch", max(self.batch_sizes), MAX_BATCH),
        ):
            if value > most:
                raise InvalidValue(f"The benchmark's {what} is {value}; it ends at {most}.")

        for kv_cache in self.kv_caches:
            if kv_cache not in KV_CACHES:
                raise InvalidValue(f"The benchmark's kv is {kv_cache!r}; it is one of {', '.join(KV_CACHES)}.")

    def cells(self) -> Iterator[Cell]:
        """In an order that loads each model and precision once: precision, then batch size, then length."""
        for kv_cache in self.kv_caches:
            specs = tuple(self._sized(spec, kv_cache) for spec in self.specs)
            for batch_size in self.batch_sizes:
                for num_prompt_tokens in self.contexts:
                    yield Cell(specs=specs, num_prompt_tokens=num_prompt_tokens, batch_size=batch_size)

    @property
    def num_runs(self) -> int:
        """Runs in all, for progress and the time left."""
        cells = len(self.kv_caches) * len(self.batch_sizes) * len(self.contexts)
        return cells * len(self.specs) * (self.warmup + self.repeats)

    def _sized(self, spec: ModelSpec, kv_cache: str) -> ModelSpec:
        needed = max(self.contexts) + self.output_tokens
        context_len = spec.context_len or -(-needed // PAGE) * PAGE
        kv_cache = spec.kv_cache if kv_cache == "auto" else kv_cache
        return replace(spec, context_len=context_len, kv_cache=kv_cache)
