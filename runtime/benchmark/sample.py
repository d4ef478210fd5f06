"""One run of one cell: prompts in, marks of the clock out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from ..engines.base import Encoded, Engine, EngineInfo, Steps, Work
from ..errors import GenerationFailed
from ..events import Event, Failed, Finished
from ..request import GREEDY, Prompt, Request
from ..stream import stream
from ..telemetry import Bytes, Clock, clock

WARM_TOKENS = 2
"""Output tokens of the warm run: only its first one matters."""


class Unstoppable:
    """An engine whose answers end by length alone, so that each run writes the same number of tokens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def bytes(self) -> Bytes:
        return self._engine.bytes

    def encode(self, prompt: Prompt) -> Encoded:
        return replace(self._engine.encode(prompt), stop=(), reasoning=None, is_endless=True)

    def generate(self, batch: Sequence[Work]) -> Steps:
        return self._engine.generate(batch)

    def trim(self, num_bytes: int) -> int:
        return self._engine.trim(num_bytes)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The ends of one batch, and the seconds from its submission to its last token."""

    finished: tuple[Finished, ...]
    wall_s: float

    @property
    def num_output_tokens(self) -> int:
        return sum(end.num_output_tokens for end in self.finished)


def take_sample(
    engine: Engine, prompts: Sequence[Prompt], output_tokens: int, *, now: Clock = clock
) -> Generator[Event, None, Sample]:
    """Answer the prompts as one greedy batch of exactly `output_tokens` each; raises the first failure."""
    requests = [Request(prompt=prompt, sampling=GREEDY, max_tokens=output_tokens) for prompt in prompts]
    began = now()
    ends: list[Finished] = []
    for event in stream(Unstoppable(engine), requests, clock=now):
        yield event
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            ends.append(event)
    wall_s = now() - began
    for end in ends:
        if end.num_output_tokens != output_tokens:
            raise GenerationFailed(
                f"{engine.info.engine} wrote {end.num_output_tokens} tokens where {output_tokens} were asked for: the "
                "row would not be comparable and is not counted. This engine cannot be told to ignore the stop token."
            )
    return Sample(finished=tuple(ends), wall_s=wall_s)
