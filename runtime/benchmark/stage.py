"""What an LLM stage costs a whole graph: load, engine, eviction, return, and the overhead around the engine."""

from __future__ import annotations

from collections.abc import Generator

from ..events import Event, Failed, Finished
from ..request import GREEDY, ModelSpec, Prompt, Request
from ..runtime import Runtime
from ..telemetry import Clock, clock
from .rows import Row

TEXT = "Expand into an image prompt: a cat on a windowsill."
OUTPUT_TOKENS = 32


def time_stage(runtime: Runtime, spec: ModelSpec, *, now: Clock = clock) -> Generator[Event, None, Row]:
    """Seconds of one stage: from nothing, resident, stepping aside, and after that.

    `cold_s` holds the load from disk; `evict_s` gives the memory back; `return_s` is the load after it, from host
    memory where the engine can wait there; `overhead_s` is the resident stage less what its engine took.
    """
    runtime.unload(spec)
    cold_s, _ = yield from _visit(runtime, spec, now)
    load_s = _load_s(runtime, spec)
    resident_s, engine_s = yield from _visit(runtime, spec, now)
    began = now()
    num_bytes = runtime.evict(spec)
    evict_s = now() - began
    returned_s, _ = yield from _visit(runtime, spec, now)
    return {
        "model": spec.model,
        "output_tokens": OUTPUT_TOKENS,
        "cold_s": cold_s,
        "load_s": load_s,
        "resident_s": resident_s,
        "engine_s": engine_s,
        "overhead_s": resident_s - engine_s,
        "evict_s": evict_s,
        "evicted_bytes": num_bytes,
        "returned_s": returned_s,
        "return_s": _load_s(runtime, spec),
    }


def _visit(runtime: Runtime, spec: ModelSpec, now: Clock) -> Generator[Event, None, tuple[float, float]]:
    """(seconds of one request as a node runs it, seconds of them from submission to the last token)."""
    request = Request(prompt=Prompt.of(TEXT), sampling=GREEDY, max_tokens=OUTPUT_TOKENS)
    began, engine_s = now(), 0.0
    for event in runtime.generate(spec, [request]):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            engine_s = event.timings.total_s or 0.0
        yield event
    return now() - began, engine_s


def _load_s(runtime: Runtime, spec: ModelSpec) -> float | None:
    """Seconds of the model's last load or return."""
    return next((one.load_s for one in runtime.residents(spec)), None)
