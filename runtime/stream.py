"""The one loop: steps of an engine in, events out."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from .engines.base import (
    Command,
    DecodeStep,
    Drop,
    Encoded,
    Engine,
    FailedStep,
    Feed,
    PrefillStep,
    Step,
    WaitStep,
    Work,
)
from .errors import GenerationFailed, ResidentError
from .events import Event, Failed, Finish, Finished, Notice, PrefillProgress, Started, TextDelta, Waiting
from .prompting.length import fit, longer_context
from .prompting.reasoning import splitter
from .prompting.stop import StopMatcher
from .request import Request
from .telemetry import Clock, Timings
from .telemetry import clock as default_clock

SILENT_STEPS = 64
"""Decode steps without a visible character after which the user is told."""


def stream(
    engine: Engine, requests: Sequence[Request], *, clock: Clock = default_clock
) -> Generator[Event, None, None]:
    """Answer a batch: the events of its requests, interleaved as the engine makes them.

    Closing it cancels what is left. A request that fails alone says `Failed`, and the others go on.
    """
    batch: list[Work] = []
    live: dict[int, _Live] = {}
    origin: list[int] = []
    for index, request in enumerate(requests):
        submitted_at = clock()
        try:
            encoded, max_tokens = fit(engine.encode, request, engine.info.context_len, longer_context(engine.info))
        except ResidentError as error:
            yield Failed(index=index, error=error)
            continue
        origin.append(index)
        live[len(batch)] = one = _Live(engine, index, request, encoded, Timings(submitted_at))
        batch.append(one.work(max_tokens))
        yield Started(index=index, num_prompt_tokens=encoded.num_tokens, max_tokens=max_tokens)
        for note in (*encoded.notes, *one.warnings):
            yield Notice(index=index, text=note)
    if not batch:
        return
    steps = engine.generate(batch)
    command: Command = None
    with contextlib.closing(steps):
        while live:
            try:
                at, step = steps.send(command)
            except StopIteration:
                lost = ", ".join(str(origin[at] + 1) for at in sorted(live))
                raise GenerationFailed(
                    f"{engine.info.engine} ended without finishing item {lost} of {len(requests)}. Run the graph again."
                ) from None
            command = None
            if at not in live:
                continue
            one = live[at]
            yield from one.take(step, clock())
            command = one.command
            if one.is_over:
                del live[at]
        if command is not None:
            with contextlib.suppress(StopIteration):
                steps.send(command)


class _Live:
    """One request while it runs."""

    def __init__(self, engine: Engine, index: int, request: Request, encoded: Encoded, timings: Timings) -> None:
        self._engine = engine
        self._index = index
        self._request = request
        self._encoded = encoded
        self._timings = timings
        self._splitter = splitter(encoded.reasoning)
        self._matcher = StopMatcher(request.prompt.stop_strings)
        self._raw: list[str] = []
        self._num_tokens = 0
        self._num_thinking = 0
        self._num_silent = 0
        self._num_cached: int | None = None
        self._closed_after: int | None = None
        self.warnings = list(self._budget_warnings())
        self.is_over = False
        self.command: Command = None

    def work(self, max_tokens: int | None) -> Work:
        return Work(
            encoded=self._encoded,
            sampling=self._request.sampling,
            max_tokens=max_tokens,
            seed=self._request.seed,
            stop_strings=() if self._encoded.reasoning else self._request.prompt.stop_strings,
        )

    def _budget_warnings(self) -> Generator[str, None, None]:
        if self._request.thinking_budget is None or self._encoded.reasoning is None:
            return
        if not (self._engine.info.capabilities.can_feed and self._encoded.reasoning.close_ids):
            yield (
                f"thinking_budget {self._request.thinking_budget} has no effect: "
                f"{self._engine.info.engine} cannot close this model's thinking block by force."
            )

    def take(self, step: Step, at: float) -> Generator[Event, None, None]:
        """One step in, its events out; sets `command` and `is_over`."""
        self.command = None
        if isinstance(step, FailedStep):
            self.is_over = True
            yield Failed(index=self._index, error=step.error)
        elif isinstance(step, WaitStep):
            yield Waiting(index=self._index, what=step.what, waited_s=step.waited_s)
        elif isinstance(step, PrefillStep):
            self._num_cached = step.num_cached
            yield PrefillProgress(
                index=self._index, num_done=step.num_done, num_total=step.num_total, num_cached=step.num_cached
            )
        else:
            yield from self._decode(step, at)

    def _decode(self, step: DecodeStep, at: float) -> Generator[Event, None, None]:
        self._timings.arrived(at, step.num_new_tokens)
        self._num_tokens += step.num_new_tokens
        self._raw.append(step.text)
        was_open = self._splitter.is_open
        parts = self._splitter.push(step.text)
        if step.thinking:
            parts.insert(0, ("thinking", step.thinking))
        if step.finish is not None:
            parts += self._splitter.flush()
        if was_open:
            self._num_thinking += step.num_new_tokens
        is_visible = False
        for channel, text in parts:
            if channel == "answer":
                text = self._matcher.push(text)
            if text:
                is_visible = is_visible or bool(text.strip())
                yield TextDelta(index=self._index, text=text, channel=channel, num_tokens=self._num_tokens)
        if step.finish is not None and (rest := self._matcher.flush()):
            yield TextDelta(index=self._index, text=rest, channel="answer", num_tokens=self._num_tokens)
        yield from self._watch_silence(is_visible or step.finish is not None)
        if self._matcher.matched is not None:
            self.command = Drop() if step.finish is None else None
            yield self._finished(Finish(reason="stop", by="string", text=self._matcher.matched), step)
        elif step.finish is not None:
            yield self._finished(step.finish, step)
        else:
            self._spend_budget()

    def _watch_silence(self, is_visible: bool) -> Generator[Event, None, None]:
        self._num_silent = 0 if is_visible else self._num_silent + 1
        if self._num_silent == SILENT_STEPS:
            warning = f"{SILENT_STEPS} steps without a visible character: the model may be stuck."
            self.warnings.append(warning)
            yield Notice(index=self._index, text=warning)

    def _spend_budget(self) -> None:
        """Close the thinking block by force once its budget is spent."""
        budget, reasoning = self._request.thinking_budget, self._encoded.reasoning
        if budget is None or reasoning is None or self._closed_after is not None or not self._splitter.is_open:
            return
        if self._num_thinking >= budget and reasoning.close_ids and self._engine.info.capabilities.can_feed:
            self._closed_after = self._num_thinking
            self.command = Feed(token_ids=reasoning.close_ids)

    def _finished(self, finish: Finish, step: DecodeStep) -> Finished:
        self.is_over = True
        details = dict(step.details)
        if self._closed_after is not None:
            details["thinking_closed_after"] = self._closed_after
        is_open = self._splitter.is_open
        if is_open and finish.by == "token":
            self.warnings.append("The model ended inside its thinking block, so there is no answer behind it.")
        num_prompt = details.pop("num_prompt_tokens", self._encoded.num_tokens)
        num_cached = details.pop("num_cached_tokens", self._num_cached)
        num_output = details.pop("num_output_tokens", self._num_tokens)
        return Finished(
            index=self._index,
            finish=finish,
            raw_text="".join(self._raw),
            is_cut_thinking=is_open and finish.reason == "length",
            num_prompt_tokens=num_prompt if isinstance(num_prompt, int) else None,
            num_cached_tokens=num_cached if isinstance(num_cached, int) else None,
            num_output_tokens=num_output if isinstance(num_output, int) else self._num_tokens,
            timings=self._timings,
            warnings=(*self._encoded.notes, *self.warnings),
            details=details,
        )
