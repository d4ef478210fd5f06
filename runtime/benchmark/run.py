"""The benchmark itself: a plan in, progress and rows out, as they come."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Union

from ..devices import Devices
from ..engines.base import Engine, EngineInfo
from ..errors import ResidentError
from ..events import Event, TextDelta
from ..journal import short_name
from ..models.info import ModelInfo, read_model
from ..request import ModelSpec, Prompt
from ..runtime import Runtime
from ..telemetry import Clock, clock
from .bandwidth import measure_bandwidth
from .ceiling import bytes_per_step
from .checks import run_checks
from .plan import Cell, Plan
from .prompts import prompt_of_length
from .rows import Measured, Row, row_of
from .sample import WARM_TOKENS, Sample, take_sample

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`done` of `total` runs; `left_s` is an estimate, None before the first run."""

    done: int
    total: int
    what: str
    left_s: float | None


@dataclass(frozen=True, kw_only=True)
class RowDone:
    """One row is complete."""

    row: Row


Benchmarking = Generator[Union[Progress, RowDone, Event], None, None]


class _Bench:
    """What one benchmark knows beyond its plan: files, bandwidths, how far it is."""

    def __init__(self, plan: Plan, runtime: Runtime, now: Clock) -> None:
        self.plan = plan
        self.runtime = runtime
        self.now = now
        self.began = now()
        self.num_done = 0
        self.devices = Devices()
        self._bandwidths: dict[str, float] = {}
        self._infos: dict[str, ModelInfo | None] = {}

    def progress(self, what: str) -> Progress:
        spent, left = self.now() - self.began, self.plan.num_runs - self.num_done
        return Progress(
            done=self.num_done,
            total=self.plan.num_runs,
            what=what,
            left_s=spent / self.num_done * left if self.num_done else None,
        )

    def measure_bandwidth(self, info: EngineInfo) -> None:
        """Measure once more; the best of all counts."""
        if info.capabilities.is_remote:
            return
        try:
            told = measure_bandwidth(info.device)
        except (ImportError, RuntimeError) as error:  # no torch, or no room beside the model
            log.info("the bandwidth of %s is not measured: %s", info.device, error)
            return
        self._bandwidths[info.device] = max(told, self._bandwidths.get(info.device, 0.0))

    def bandwidth(self, info: EngineInfo) -> float | None:
        return None if info.capabilities.is_remote else self._bandwidths.get(info.device)

    def model_info(self, spec: ModelSpec) -> ModelInfo | None:
        """What the model's files say; None for a server's model."""
        if spec.model not in self._infos:
            try:
                self._infos[spec.model] = read_model(spec.model)
            except ResidentError:
                self._infos[spec.model] = None
        return self._infos[spec.model]


def run(plan: Plan, runtime: Runtime, *, now: Clock = clock) -> Benchmarking:
    """Measure every cell of the plan. Rows come as they are done, so closing it keeps those that came.

    A model that fails gives a row with its error and no figures; the others go on.
    """
    bench = _Bench(plan, runtime, now)
    for number, cell in enumerate(plan.cells()):
        yield from _measure_cell(bench, cell, number)


def _measure_cell(bench: _Bench, cell: Cell, number: int) -> Benchmarking:
    plan = bench.plan
    measured: dict[int, Measured] = {}
    failed: dict[int, str] = {}
    for repeat in range(-plan.warmup, plan.repeats):
        for at, spec in enumerate(cell.specs):
            if at not in failed:
                yield bench.progress(_what(spec, cell))
                try:
                    one = measured.get(at)
                    measured[at] = yield from _run_once(
                        bench, cell, spec, one, seed=_seed(number, repeat), repeat=repeat
                    )
                except ResidentError as error:
                    failed[at] = str(error)
            bench.num_done += 1
    for at, spec in enumerate(cell.specs):
        one = measured.get(at) or Measured(spec=spec, info=_unknown(spec))
        if at in failed:
            one.errors.append(failed[at])
        yield RowDone(row=_row(bench, cell, one))
    yield bench.progress("done")


def _run_once(
    bench: _Bench, cell: Cell, spec: ModelSpec, one: Measured | None, *, seed: int, repeat: int
) -> Generator[Event, None, Measured]:
    """One run of one model: cold, then warm with the same prompts."""
    num_loads, began = bench.runtime.num_loads(spec), bench.now()
    lease = yield from bench.runtime.leasing(spec)
    load_s = bench.now() - began if bench.runtime.num_loads(spec) > num_loads else None
    with lease as engine:
        if one is None:
            one = Measured(spec=spec, info=engine.info)
            bench.devices.read(engine.info.device)  # the driver's library is loaded now and not inside a sample
            if bench.plan.has_checks:
                one.checks = run_checks(engine, bench.model_info(spec))
        one.load_s = load_s if load_s is not None else one.load_s
        prompts = [
            prompt_of_length(engine.encode, cell.num_prompt_tokens, seed=seed * 1000 + item)
            for item in range(cell.batch_size)
        ]
        counters = _Counters(engine.info.device)
        clocks: list[int] = []
        cold = yield from _sample(bench, spec, engine, prompts, bench.plan.output_tokens, clocks)
        warm = yield from _sample(bench, spec, engine, prompts, WARM_TOKENS, [])
        if repeat >= 0:
            one.cold.append(cold)
            one.warm.append(warm)
            one.sm_clocks_mhz += clocks
            if bench.model_info(spec) is not None:
                bench.measure_bandwidth(engine.info)
        one.info, one.bytes = engine.info, engine.bytes
        one.device_counters = counters.read()
    return one


def _sample(
    bench: _Bench, spec: ModelSpec, engine: Engine, prompts: list[Prompt], output_tokens: int, clocks: list[int]
) -> Generator[Event, None, Sample]:
    """One sample, which the monitor shows as a run; in its middle the device's clock is read once, into `clocks`."""
    sampling = take_sample(engine, prompts, output_tokens, now=bench.now)
    with closing(bench.runtime.journal.follow(bench.runtime.settled(spec), len(prompts), sampling)) as followed:
        has_read = False
        while True:
            try:
                event = next(followed)
            except StopIteration as end:
                sample: Sample = end.value
                return sample
            if not has_read and isinstance(event, TextDelta) and event.num_tokens >= output_tokens // 2:
                has_read = True
                clock_mhz = bench.devices.read(engine.info.device).sm_clock_mhz
                clocks += [] if clock_mhz is None else [clock_mhz]
            yield event


def _row(bench: _Bench, cell: Cell, one: Measured) -> Row:
    info = bench.model_info(one.spec) if one.cold else None
    step_bytes = None
    if info is not None and not one.info.capabilities.is_remote:
        step_bytes = bytes_per_step(
            info,
            weights_bytes=one.bytes.weights
            or info.weights_bytes,  # what an engine maps from the file, it counts as none
            kv_cache=one.info.kv_cache,
            num_tokens=cell.num_prompt_tokens + bench.plan.output_tokens // 2,
            batch_size=cell.batch_size,
        )
    return row_of(
        one,
        num_prompt_tokens=cell.num_prompt_tokens,
        batch_size=cell.batch_size,
        output_tokens=bench.plan.output_tokens,
        bandwidth=bench.bandwidth(one.info),
        step_bytes=step_bytes,
    )


def _seed(number: int, repeat: int) -> int:
    return (number + 1) * 100 + repeat + 50


def _what(spec: ModelSpec, cell: Cell) -> str:
    return f"{short_name(spec.model)}, {cell.num_prompt_tokens} tokens x {cell.batch_size}"


def _unknown(spec: ModelSpec) -> EngineInfo:
    return EngineInfo(
        engine=spec.engine,
        model=spec.model,
        context_len=spec.context_len,
        device=spec.device,
        dtype=spec.dtype,
        attention=spec.attention,
        kv_cache=spec.kv_cache,
    )


class _Counters:
    """Torch's counters of one CUDA device over one run; nothing elsewhere."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._torch: Any = sys.modules.get("torch") if device.startswith("cuda") else None
        if self._torch:
            self._torch.cuda.reset_peak_memory_stats(device)
            self._retries = self._torch.cuda.memory_stats(device).get("num_alloc_retries", 0)

    def read(self) -> dict[str, object]:
        if not self._torch:
            return {}
        stats = self._torch.cuda.memory_stats(self._device)
        reserved, allocated = (self._torch.cuda.memory_reserved, self._torch.cuda.memory_allocated)
        return {
            "peak_device_bytes": self._torch.cuda.max_memory_allocated(self._device),
            "reserved_minus_allocated_bytes": reserved(self._device) - allocated(self._device),
            "num_alloc_retries": stats.get("num_alloc_retries", 0) - self._retries,
        }
