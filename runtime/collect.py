"""Fold the events of a batch into results: text, thinking and report."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .engines.base import EngineInfo
from .errors import GenerationFailed, ResidentError
from .events import Event, Failed, Finished, TextDelta
from .prompting.clean import clean
from .request import ModelSpec, Request
from .telemetry import Bytes, percentile, without_nan

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One request's outcome. `report` holds only JSON values; see `report_of` for its keys."""

    text: str
    thinking_text: str
    report: dict[str, object]


class Collector:
    """Take events as they pass, then give one result per request, in the order of the requests."""

    def __init__(self, spec: ModelSpec, requests: Sequence[Request]) -> None:
        self._spec = spec
        self._requests = requests
        self._text: list[list[str]] = [[] for _ in requests]
        self._thinking: list[list[str]] = [[] for _ in requests]
        self._ends: dict[int, Finished | Failed] = {}

    def take(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            (self._text if event.channel == "answer" else self._thinking)[event.index].append(event.text)
        elif isinstance(event, (Finished, Failed)):
            self._ends[event.index] = event

    def text(self, index: int) -> str:
        """The answer of one request as it stands."""
        return "".join(self._text[index])

    def drain(self, events: Generator[Event, None, Answer]) -> Answer:
        """Take all events of a stream; give what the stream returns."""
        while True:
            try:
                self.take(next(events))
            except StopIteration as end:
                answer: Answer = end.value
                return answer

    def results(self, info: EngineInfo, num_bytes: Bytes) -> list[Result]:
        """All results; raises the error of the first request that failed, saying how the others fared."""
        return results_of(self.outcomes(info, num_bytes))

    def outcomes(self, info: EngineInfo, num_bytes: Bytes) -> list[Result | ResidentError]:
        """A result or an error per request, in the order of the requests."""
        return [self._outcome(index, info, num_bytes) for index in range(len(self._requests))]

    def _outcome(self, index: int, info: EngineInfo, num_bytes: Bytes) -> Result | ResidentError:
        end = self._ends.get(index)
        if end is None:
            return GenerationFailed(f"{info.engine} gave no end for this request. Run the graph again.")
        if isinstance(end, Failed):
            return end.error
        request, text, thinking = self._requests[index], self.text(index), "".join(self._thinking[index])
        if end.is_cut_thinking:
            if request.on_cut_thinking == "error":
                return GenerationFailed(
                    f"The limit of {end.num_output_tokens} output tokens came before the thinking block closed, so "
                    "there is no answer. Raise max_tokens, set a thinking_budget below it, or set on_cut_thinking."
                )
            if request.on_cut_thinking == "thinking":
                text = thinking
        report = report_of(self._spec, request, end, info, num_bytes)
        if thinking:
            text = text.lstrip("\n")  # models put empty lines between the block and the answer
        if request.prompt.clean:
            text, report["cleaned"] = clean(text, request.prompt.clean)
        return Result(text=text, thinking_text=thinking, report=report)


def results_of(outcomes: Sequence[Result | ResidentError]) -> list[Result]:
    """All results; raises the first error, saying which item it was and how the others fared."""
    failed = [(index, error) for index, error in enumerate(outcomes) if isinstance(error, ResidentError)]
    if failed:
        index, error = failed[0]
        if len(outcomes) == 1:
            raise error
        raise type(error)(
            f"Item {index + 1} of {len(outcomes)} failed: {error} "
            f"({len(outcomes) - len(failed)} of {len(outcomes)} items finished.)"
        ) from error
    return [outcome for outcome in outcomes if isinstance(outcome, Result)]


def report_of(
    spec: ModelSpec, request: Request, end: Finished, info: EngineInfo, num_bytes: Bytes
) -> dict[str, object]:
    """The report of one finished request, JSON values only; times in seconds, memory in bytes."""
    timings = end.timings
    return {
        "model": info.model,
        "engine": info.engine,
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention,
        "kv_cache": info.kv_cache,
        "context_len": info.context_len,
        "finish": end.finish.as_dict(),
        "num_prompt_tokens": end.num_prompt_tokens,
        "num_cached_tokens": end.num_cached_tokens,
        "num_output_tokens": end.num_output_tokens,
        "ttft_s": timings.ttft_s,
        "tpot_s": timings.tpot_s,
        "itl_p50_s": percentile(timings.itl_s(), 50),
        "itl_p99_s": percentile(timings.itl_s(), 99),
        "decode_tokens_per_s": timings.decode_tokens_per_s,
        "total_s": timings.total_s,
        "seed": request.seed,
        "bytes": num_bytes.as_dict(),
        "patches": list(info.patches),
        "warnings": [*info.warnings, *end.warnings],
        "raw_text": end.raw_text,
        **without_nan(end.details),
    }


def collect(events: Iterable[Event], spec: ModelSpec, requests: Sequence[Request]) -> Collector:
    """Drain a stream into a collector."""
    collector = Collector(spec, requests)
    for event in events:
        collector.take(event)
    return collector
