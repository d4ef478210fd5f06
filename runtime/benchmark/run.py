"""The benchmark itself: a plan in, progress and rows out, as they come."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Union

from ..engines.base import Engine, EngineInfo
from ..errors import ResidentError
from ..events import Event
from ..journal import short_name
from ..models.info import ModelInfo, read_model
from ..request import ModelSpec
from ..runtime import Runtime
from ..telemetry import Clock, clock
from .bandwidth import measure_bandwidth
from .ceiling import bytes_per_step
from .checks import run_checks
from .plan import Cell, Plan
from .prompts import prompt_of_length
from .rows import Measured, Row, row_of
from .sample import WARM_TOKENS, Sample, take_sample


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
        self._bandwidths: dict[str, float | None] = {}
        self._infos: dict[str, ModelInfo | None] = {}

    def progress(self, what: str) -> Progress:
        spent, left = self.now() - self.began, self.plan.num_runs - self.num_done
        return Progress(
            done=self.num_done,
            total=self.plan.num_runs,
            what=what,
            left_s=spent / self.num_done * left if self.num_done else None,
        )

    def bandwidth(self, device: str, *, is_remote: bool) -> float | None:
        if is_remote:
            return None
        if device not in self._bandwidths:
            try:
                self._bandwidths[device] = measure_bandwidth(device)
            except (ImportError, RuntimeError):
                self._bandwidths[device] = None
        return self._bandwidths[device]

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
            if bench.plan.has_checks:
                one.checks = run_checks(engine, bench.model_info(spec))
        one.load_s = load_s if load_s is not None else one.load_s
        prompts = [
            prompt_of_length(engine.encode, cell.num_prompt_tokens, seed=seed * 1000 + item)
            for item in range(cell.batch_size)
        ]
        counters = _Counters(engine.info.device)
        cold = yield from _sample(engine, prompts, bench.plan.output_tokens, bench.now)
        warm = yield from _sample(engine, prompts, WARM_TOKENS, bench.now)
        if repeat >= 0:
            one.cold.append(cold)
            one.warm.append(warm)
        one.info, one.bytes = engine.info, engine.bytes
        one.device_counters = counters.read()
    return one


def _sample(engine: Engine, prompts: list[Any], output_tokens: int, now: Clock) -> Generator[Event, None, Sample]:
    with closing(take_sample(engine, prompts, output_tokens, now=now)) as sampling:
        return (yield from sampling)


def _row(bench: _Bench, cell: Cell, one: Measured) -> Row:
    info = bench.model_info(one.spec) if one.cold else None
    step_bytes = None
    if info is not None and one.bytes.weights:
        step_bytes = bytes_per_step(
            info,
            weights_bytes=one.bytes.weights,
            kv_cache=one.info.kv_cache,
            num_tokens=cell.num_prompt_tokens + bench.plan.output_tokens // 2,
            batch_size=cell.batch_size,
        )
    bandwidth = None
    if one.cold:
        bandwidth = bench.bandwidth(one.info.device, is_remote=one.info.capabilities.is_remote)
    return row_of(
        one,
        num_prompt_tokens=cell.num_prompt_tokens,
        batch_size=cell.batch_size,
        output_tokens=bench.plan.output_tokens,
        bandwidth=bandwidth,
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
