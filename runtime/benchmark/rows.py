"""Samples of one cell -> a row, and what makes a row invalid."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..engines.base import EngineInfo
from ..request import ModelSpec
from ..telemetry import Bytes, percentile
from .sample import Sample

Row = dict[str, object]
"""JSON values only. Seconds end in _s, bytes in _bytes, rates in _per_s; None is what cannot be known here."""

CEILING_SLACK = 1.05
"""A rate may pass the ceiling by this factor before it counts as an error of measurement."""

CLOCK_SLACK = 1.05
"""The fastest clock seen may be this many times the slowest."""


@dataclass(kw_only=True)
class Measured:
    """All counted runs of one model in one cell.

    cold, warm:    the same prompts when the cache had not seen them, and again at once
    sm_clocks_mhz: seen in the middle of each cold run; empty where no driver tells
    """

    spec: ModelSpec
    info: EngineInfo
    cold: list[Sample] = field(default_factory=list)
    warm: list[Sample] = field(default_factory=list)
    bytes: Bytes = field(default_factory=Bytes)
    load_s: float | None = None
    device_counters: dict[str, object] = field(default_factory=dict)
    sm_clocks_mhz: list[int] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def row_of(
    measured: Measured,
    *,
    num_prompt_tokens: int,
    batch_size: int,
    output_tokens: int,
    bandwidth: float | None,
    step_bytes: float | None,
) -> Row:
    """The row of one model in one cell; medians over runs and requests, with min and max of the decode rate."""
    ends = [end for sample in measured.cold for end in sample.finished]
    timings = [end.timings for end in ends]
    rates = [rate for one in timings if (rate := one.decode_tokens_per_s)]
    prompt_lengths = [end.num_prompt_tokens for end in ends if end.num_prompt_tokens is not None]
    cold = _median([one.ttft_s for one in timings])
    throughput = _median([sample.num_output_tokens / sample.wall_s for sample in measured.cold if sample.wall_s])
    new_tokens = _median([(end.num_prompt_tokens or 0) - (end.num_cached_tokens or 0) for end in ends])
    ceiling = batch_size * bandwidth / step_bytes if bandwidth and step_bytes else None
    reached = throughput if batch_size > 1 else _median(rates)
    row: Row = {
        "model": measured.info.model,
        "engine": measured.info.engine,
        "device": measured.info.device,
        "dtype": measured.info.dtype,
        "attention": measured.info.attention,
        "kv_cache": measured.info.kv_cache,
        "num_prompt_tokens": int(statistics.median(prompt_lengths)) if prompt_lengths else num_prompt_tokens,
        "batch": batch_size,
        "output_tokens": output_tokens,
        "repeats": len(measured.cold),
        "latency_p50_s": percentile([one.total_s for one in timings if one.total_s is not None], 50),
        "latency_p99_s": percentile([one.total_s for one in timings if one.total_s is not None], 99),
        "ttft_cold_s": cold,
        "ttft_warm_s": _median([end.timings.ttft_s for sample in measured.warm for end in sample.finished]),
        "prefill_tokens_per_s": new_tokens / cold if cold and new_tokens else None,
        "tpot_p50_s": percentile([one.tpot_s for one in timings if one.tpot_s is not None], 50),
        "tpot_p99_s": percentile([one.tpot_s for one in timings if one.tpot_s is not None], 99),
        "itl_p99_s": percentile([gap for one in timings for gap in one.itl_s()], 99),
        "decode_tokens_per_s": _median(rates),
        "decode_tokens_per_s_min": min(rates, default=None),
        "decode_tokens_per_s_max": max(rates, default=None),
        "throughput_tokens_per_s": throughput,
        "load_s": measured.load_s,
        "bytes": measured.bytes.as_dict(),
        "peak_device_bytes": None,
        "reserved_minus_allocated_bytes": None,
        "num_alloc_retries": None,
        **measured.device_counters,
        "num_cached_tokens": _median([end.num_cached_tokens for s in measured.warm for end in s.finished]),
        "num_drafted_tokens": _total(ends, lambda end: end.details.get("num_drafted_tokens")),
        "num_accepted_tokens": _total(ends, lambda end: end.details.get("num_accepted_tokens")),
        "bandwidth_bytes_per_s": bandwidth,
        "step_bytes": step_bytes,
        "ceiling_tokens_per_s": ceiling,
        "percent_of_ceiling": 100 * reached / ceiling if ceiling and reached else None,
        "sm_clock_mhz_min": min(measured.sm_clocks_mhz, default=None),
        "sm_clock_mhz_max": max(measured.sm_clocks_mhz, default=None),
        "checks": measured.checks,
        "notes": [],
        "errors": measured.errors,
    }
    measured.errors += faults_of(row)
    row["notes"] = notes_of(row)
    return row


def faults_of(row: Row) -> list[str]:
    """What makes the row's figures unbelievable, as sentences."""
    faults = []
    if _is_above_ceiling(row) and row["device"] != "cpu":
        faults.append(
            f"The rate is {row['percent_of_ceiling']:.0f} % of what the memory bandwidth allows without drafting: "
            "an error of measurement."
        )
    slow, fast = row["sm_clock_mhz_min"], row["sm_clock_mhz_max"]
    if isinstance(slow, int) and isinstance(fast, int) and slow < fast / CLOCK_SLACK:
        faults.append(f"The clock changed between {slow} and {fast} MHz during the runs: they are not comparable.")
    checks = row["checks"]
    if isinstance(checks, dict):
        faults += [f"{name}: {verdict}" for name, verdict in checks.items() if str(verdict).startswith("failed")]
    return faults


def notes_of(row: Row) -> list[str]:
    """What a reader should know and is no fault.

    A processor's cache may hold a small model, and other programs use its memory while the bandwidth is measured, so
    that its ceiling is a hint.
    """
    if not _is_above_ceiling(row) or row["device"] != "cpu":
        return []
    return [
        f"The rate is {row['percent_of_ceiling']:.0f} % of what the measured memory bandwidth allows: the processor's "
        "cache may hold the model, or other programs used the memory."
    ]


def _is_above_ceiling(row: Row) -> bool:
    percent = row["percent_of_ceiling"]
    return isinstance(percent, float) and percent > 100 * CEILING_SLACK and not row["num_drafted_tokens"]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _total(ends: Sequence[object], get: Callable[..., object]) -> int | None:
    known = [value for end in ends if isinstance(value := get(end), int)]
    return sum(known) if known else None
