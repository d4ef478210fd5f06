"""The one clock and the one ledger: latencies of a request, bytes of a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Clock = Callable[[], float]
clock: Clock = time.perf_counter


@dataclass
class Timings:
    """When tokens arrived, in seconds of one clock; every latency that we show comes from these marks.

    Mark `submitted`, then `arrived(n)` with the number of new tokens each time that some come.
    """

    submitted_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def arrived(self, at: float, num_tokens: int) -> None:
        """Mark the arrival of `num_tokens` more tokens."""
        if num_tokens:
            self.arrivals.append((at, num_tokens))

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        """Submit to first token; None before it."""
        return self.arrivals[0][0] - self.submitted_at if self.arrivals else None

    @property
    def total_s(self) -> float | None:
        """Submit to last token."""
        return self.arrivals[-1][0] - self.submitted_at if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first step: (last - first arrival) / tokens after the first step."""
        later = sum(n for _, n in self.arrivals[1:])
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return 1 / self.tpot_s if self.tpot_s else None

    def itl_s(self) -> list[float]:
        """The gaps between arrivals, in order."""
        return [b[0] - a[0] for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Sums(dict[int, int]):
    """Numbers by item, 0 for one not heard of, with their sum at hand: a batch is not added up anew at each token."""

    total = 0

    def __missing__(self, item: int) -> int:
        return 0

    def __setitem__(self, item: int, number: int) -> None:
        self.total += number - self[item]
        super().__setitem__(item, number)


class OutputTokens(Sums):
    """Output tokens of each item, 0 for one not heard of; `allow` says how many an item may have."""

    def __init__(self) -> None:
        super().__init__()
        self._limits = Sums()
        self._has_unlimited = False

    def allow(self, item: int, max_tokens: int | None) -> None:
        """Note an item's limit; None is no limit."""
        self._limits[item] = max_tokens or 0
        self._has_unlimited = self._has_unlimited or max_tokens is None

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens of all items so far, most that they can come to or 0 if that is not known)."""
        return self.total, 0 if self._has_unlimited else self._limits.total


def percentile(values: list[float], percent: float) -> float | None:
    """The nearest-rank percentile; None of nothing.

    >>> percentile([3.0, 1.0, 2.0], 50)
    2.0
    """
    if not values:
        return None
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[int(rank) - 1]


def without_nan(value: Any) -> Any:
    """The JSON value with None for every number that JSON has no word for; what a server tells may hold such.

    >>> without_nan({"a": [float("nan"), 1.5], "b": float("-inf")})
    {'a': [None, 1.5], 'b': None}
    """
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Where a model's memory lies, in bytes. `host_copy` is system memory, the rest is the device's."""

    weights: int = 0
    kv_cache: int = 0
    captured: int = 0
    scratch: int = 0
    host_copy: int = 0

    @property
    def device(self) -> int:
        """All that counts against the device."""
        return self.weights + self.kv_cache + self.captured + self.scratch

    def as_dict(self) -> dict[str, int]:
        return {
            "weights": self.weights,
            "kv_cache": self.kv_cache,
            "captured": self.captured,
            "scratch": self.scratch,
            "host_copy": self.host_copy,
            "device": self.device,
        }


def format_bytes(num_bytes: float) -> str:
    """Bytes for a reader, in decimal units.

    >>> format_bytes(17_700_000_000)
    '17.7 GB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{int(num_bytes)} bytes"
