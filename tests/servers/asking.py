"""How tests ask a model on a server."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator

from runtime import GREEDY, ModelSpec, Prompt, Request, Result, Runtime, collect
from runtime.engines.base import DecodeStep, Engine, Work
from runtime.events import Event, Failed, TextDelta


def ask(text: str, *, stop_strings: tuple[str, ...] = (), **fields) -> Request:
    fields = {"sampling": GREEDY, "max_tokens": 16, **fields}
    return Request(prompt=Prompt(messages=Prompt.of(text).messages, stop_strings=stop_strings), **fields)


def results(runtime: Runtime, spec: ModelSpec, *requests: Request) -> list[Result]:
    collector = collect(runtime.generate(spec, requests), spec, requests)
    [resident] = runtime.residents(spec)
    return collector.results(resident.info, resident.bytes)


def begin(runtime: Runtime, spec: ModelSpec, *, max_tokens: int, num_deltas: int = 3) -> Generator[Event, None, None]:
    """A long answer that has begun."""
    events = runtime.generate(spec, [ask("Tell me a very long story.", max_tokens=max_tokens)])
    list(itertools.islice((one for one in events if isinstance(one, TextDelta)), num_deltas))
    return events


def drain(events: Generator[Event, None, None]) -> None:
    """Take what is left; raise the error of the request that failed."""
    with contextlib.closing(events):
        for event in events:
            if isinstance(event, Failed):
                raise event.error


def steps_of(engine: Engine, text: str, **fields) -> list[DecodeStep]:
    """An answer as the engine gives it, below everything that matches stops in text."""
    [steps] = _run(engine, text, **fields)
    return steps


def answers(engine: Engine, *texts: str, **fields) -> list[list[int]]:
    """The ids of the answers to a list of prompts."""
    return [[one for step in steps for one in step.token_ids] for steps in _run(engine, *texts, **fields)]


def _run(engine: Engine, *texts: str, **fields) -> list[list[DecodeStep]]:
    fields = {"sampling": GREEDY, "max_tokens": 16, "seed": 0, **fields}
    found: list[list[DecodeStep]] = [[] for _ in texts]
    for index, step in engine.generate([Work(encoded=engine.encode(Prompt.of(text)), **fields) for text in texts]):
        if isinstance(step, DecodeStep):
            found[index].append(step)
    return found
