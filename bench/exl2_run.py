"""Running an engine on prompts of given ids, and the SDK alone beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from runtime import GREEDY, ModelSpec, Prompt, Request
from runtime.engines import exllamav2
from runtime.engines.base import Encoded, StopEntry
from runtime.events import Failed, Finished
from runtime.stream import stream


class FixedPrompts:
    """An engine whose prompts are ids written as numbers, so that lengths are exact; all else is the engine's."""

    def __init__(self, engine: Any, stop_ids: Sequence[int] = ()) -> None:
        self._engine, self._stop = engine, stop_ids
        self.info, self.generate = engine.info, engine.generate

    @property
    def bytes(self) -> Any:
        return self._engine.bytes

    def encode(self, prompt: Prompt) -> Encoded:
        text = prompt.messages[-1].text
        stop = tuple(StopEntry(id=one, text="", source="bench") for one in self._stop)
        return Encoded(prompt=prompt, token_ids=tuple(map(int, text.split())), text=text, stop=stop)


@contextmanager
def opened(model: Any, **fields: Any) -> Iterator[Any]:
    """A loaded engine, closed at the end; `load_s` is set on it."""
    spec = ModelSpec(model=str(model), engine="exllamav2", **fields)
    began, loading = time.perf_counter(), exllamav2.load(spec)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            engine = end.value
            break
    engine.load_s = time.perf_counter() - began
    try:
        yield engine
    finally:
        engine.close()


def ask(ids: Sequence[int], max_tokens: int) -> Request:
    return Request(prompt=Prompt.of(" ".join(map(str, ids))), sampling=GREEDY, max_tokens=max_tokens)


def answer(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **more: Any) -> list[Finished]:
    """The ends of all requests, in order; raises the first failure."""
    ends: dict[int, Finished] = {}
    for event in stream(FixedPrompts(engine, **more), [ask(ids, max_tokens) for ids in prompts]):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            ends[event.index] = event
    return [ends[index] for index in range(len(prompts))]


def output_ids(
    engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int, *, stop_ids: Sequence[int] = ()
) -> list[list[int]]:
    """Output ids of all prompts, greedy."""
    from runtime.engines.base import DecodeStep, Work

    fixed = FixedPrompts(engine, stop_ids)
    batch = [
        Work(encoded=fixed.encode(Prompt.of(" ".join(map(str, ids)))), sampling=GREEDY, max_tokens=max_tokens, seed=0)
        for ids in prompts
    ]
    out: list[list[int]] = [[] for _ in prompts]
    for index, step in engine.generate(batch):
        if isinstance(step, DecodeStep):
            out[index] += step.token_ids
    return out


def bare_generator(engine: Any, max_batch: int = 8) -> Any:
    """The SDK as its own examples use it, on the same weights and cache, with its own tokenizer."""
    parts = engine._parts
    tokenizer = parts.sdk.package.ExLlamaV2Tokenizer(parts.config)
    return parts.sdk.generator.ExLlamaV2DynamicGenerator(
        model=parts.model, cache=parts.cache, tokenizer=tokenizer, max_batch_size=max_batch
    )


def bare(generator: Any, sdk: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, float, int]:
    """(seconds to the first token, seconds from first to last, tokens after the first of each) of the SDK's loop."""
    began, first, num = time.perf_counter(), None, 0
    for ids in prompts:
        generator.enqueue(
            sdk.generator.ExLlamaV2DynamicJob(
                input_ids=torch.tensor([list(ids)]),
                max_new_tokens=max_tokens,
                gen_settings=sdk.generator.ExLlamaV2Sampler.Settings.greedy(),
            )
        )
    while generator.num_remaining_jobs():
        for result in generator.iterate():
            if result["stage"] == "streaming":
                num += 1
                if first is None:
                    first = time.perf_counter()
    assert first is not None
    return first - began, time.perf_counter() - first, num
