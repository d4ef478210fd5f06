"""What a Runtime did, and is doing: in memory, bounded, from events that pass anyway. No call to a device."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from .events import Event, Failed, Finished, LoadProgress, PrefillProgress, Started, TextDelta, Waiting
from .request import ModelSpec
from .telemetry import Clock, OutputTokens, Sums
from .telemetry import clock as default_clock

NUM_RUNS = 50
NUM_MARKS = 400
NUM_REPORTS = 16
"""Most reports that are kept of one run."""

RATE_WINDOW_S, RATE_MARKS = 2.0, 3
"""A rate is told over so many seconds, or over so many marks where they come more slowly."""

STALL_S = 5.0
"""After so long without a token the rate is 0."""

Answer = TypeVar("Answer")
Report = dict[str, object]
MarkKind = Literal["load", "return", "evict", "unload"]
Phase = Literal["waiting", "load", "prefill", "decode"]
Outcome = Literal["done", "failed", "interrupted"]

TEXTS = ("raw_text", "cleaned")
"""What a report holds of the model's words; the journal keeps none of it."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A model came or went.

    at, seconds: when that was done, by the one clock, and how long it took
    num_bytes:   of this model on its device; those freed, if it went
    held_bytes:  of all models of the runtime after it
    """

    kind: MarkKind
    model: str
    at: float
    seconds: float
    num_bytes: int
    held_bytes: int


@dataclass
class Usage:
    """Sums over the finished requests of one model; `context_used` is of the last request, or of the live ones."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    context_used: int = 0


class Run:
    """One batch from its first event to its end."""

    def __init__(self, number: int, spec: ModelSpec, num_items: int, clock: Clock) -> None:
        self.number = number
        self.spec = spec
        self.num_items = num_items
        self.began_at = clock()
        self.ended_at: float | None = None
        self.phase: Phase = "waiting"
        self.outcome: Outcome = "interrupted"
        self.error: str | None = None
        self.progress: tuple[int, int] | None = None
        self.unit = "bytes"
        self.waits_for: str | None = None
        self.num_failed = 0
        self.ends: dict[int, Finished] = {}
        self.reports: tuple[Report, ...] = ()
        self.first_at: float | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._started_at: float | None = None
        self._prefill_done, self._prefill_total, self._cached = Sums(), Sums(), Sums()
        self._num_tokens = OutputTokens()
        self._recent: deque[tuple[float, int]] = deque()

    def take(self, event: Event) -> None:
        """Note what one event says. O(1) in the tokens so far and in the items."""
        with self._lock:
            self._take(event, self._clock())

    def _take(self, event: Event, now: float) -> None:
        self.waits_for = event.what if isinstance(event, Waiting) else None
        if isinstance(event, LoadProgress):
            self.phase, self.progress, self.unit = "load", (event.done, event.total), event.unit
        elif isinstance(event, Started):
            self._started_at = now if self._started_at is None else self._started_at
            self._num_tokens.allow(event.index, event.max_tokens)
            self._set_prefill(event.index, 0, event.num_prompt_tokens or 0, 0)
        elif isinstance(event, PrefillProgress):
            self._set_prefill(event.index, event.num_done, event.num_total, event.num_cached)
        elif isinstance(event, TextDelta):
            self._set_tokens(event.index, event.num_tokens, now)
        elif isinstance(event, Finished):
            self._set_tokens(event.index, event.num_output_tokens, now)
            self.ends[event.index] = event
        elif isinstance(event, Failed):
            self.num_failed += 1

    def _set_prefill(self, index: int, done: int, total: int, cached: int) -> None:
        self._prefill_done[index], self._prefill_total[index], self._cached[index] = done, total, cached
        if self.phase != "decode":
            self.phase, self.unit = "prefill", "tokens"
            self.progress = (self._prefill_done.total, self._prefill_total.total)

    def _set_tokens(self, index: int, num_tokens: int, now: float) -> None:
        self.phase, self.unit = "decode", "tokens"
        self._num_tokens[index] = num_tokens
        self.first_at = now if self.first_at is None else self.first_at
        self.progress = self._num_tokens.progress
        self._recent.append((now, self._num_tokens.total))
        while len(self._recent) > RATE_MARKS and now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()

    def forget(self) -> None:
        """Let go of what only a live run needs: the answers, and a mark of each token."""
        with self._lock:
            self.ends = {}
            self._recent.clear()

    @property
    def num_tokens(self) -> int:
        """Output tokens of all items so far."""
        with self._lock:
            return self._num_tokens.total

    @property
    def context_used(self) -> int:
        """Tokens in the cache of the item that has most."""
        with self._lock:
            return max((done + self._num_tokens[index] for index, done in self._prefill_done.items()), default=0)

    @property
    def num_cached_tokens(self) -> int:
        with self._lock:
            return self._cached.total

    @property
    def ttft_s(self) -> float | None:
        """From the first submission of the batch to its first token."""
        if self.first_at is None or self._started_at is None:
            return None
        return self.first_at - self._started_at

    def tokens_per_s(self) -> float | None:
        """Output tokens per second of late, all items together; None before there are two marks."""
        with self._lock:
            now, marks = self._clock(), list(self._recent)
        if not marks or self.phase != "decode" or self.ended_at is not None:
            return None
        if now - marks[-1][0] > STALL_S:
            return 0.0
        (began, before), (_, after) = marks[0], marks[-1]
        return (after - before) / (now - began) if len(marks) > 1 and now > began else None


def short_name(model: object) -> str:
    """A model's name without its folders."""
    return str(model).replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def without_texts(report: Report) -> Report:
    """A report that tells nothing of what was asked or answered, nor where the model lies."""
    kept = {key: value for key, value in report.items() if key not in TEXTS}
    if "model" in kept:
        kept["model"] = short_name(kept["model"])
    if isinstance(finish := kept.get("finish"), dict):
        kept["finish"] = {key: value for key, value in finish.items() if key != "text"}
    return kept


@dataclass
class Journal:
    """The last runs and marks, the live runs, and sums by model. `version` grows when one comes or goes."""

    clock: Clock = default_clock
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=NUM_MARKS))
    runs: deque[Run] = field(default_factory=lambda: deque(maxlen=NUM_RUNS))
    usage: dict[ModelSpec, Usage] = field(default_factory=dict)
    version: int = 0
    _live: dict[int, Run] = field(default_factory=dict)
    _num_runs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: MarkKind, spec: ModelSpec, *, seconds: float, num_bytes: int, held_bytes: int) -> None:
        """Keep that a model came or went."""
        mark = Mark(
            kind=kind, model=spec.model, at=self.clock(), seconds=seconds, num_bytes=num_bytes, held_bytes=held_bytes
        )
        with self._lock:
            self.marks.append(mark)
            self.version += 1

    def live(self) -> list[Run]:
        """The runs that have not ended, in their order."""
        with self._lock:
            return list(self._live.values())

    def last_runs(self) -> list[Run]:
        """The runs that have ended, oldest first."""
        with self._lock:
            return list(self.runs)

    def last_marks(self) -> list[Mark]:
        """Arrivals and departures, oldest first."""
        with self._lock:
            return list(self.marks)

    def follow(
        self,
        spec: ModelSpec,
        num_items: int,
        events: Generator[Event, None, Answer],
        reports: Callable[[Answer, dict[int, Finished]], Sequence[Report]] | None = None,
    ) -> Generator[Event, None, Answer]:
        """The same events; meanwhile they are a live run, and after it one of the last runs, if `reports` makes any."""
        with self._lock:
            self._num_runs += 1
            self.version += 1
            run = self._live[self._num_runs] = Run(self._num_runs, spec, num_items, self.clock)
        try:
            with contextlib.closing(events):
                while True:
                    try:
                        event = next(events)
                    except StopIteration as end:
                        answer: Answer = end.value
                        break
                    run.take(event)
                    yield event
            run.outcome = "failed" if run.num_failed == num_items else "done"
            if reports:
                run.reports = tuple(map(without_texts, reports(answer, run.ends)))[:NUM_REPORTS]
            return answer
        except GeneratorExit:
            raise
        except BaseException as error:
            run.outcome, run.error = "failed", type(error).__name__
            raise
        finally:
            self._end(run, is_kept=reports is not None)

    def _end(self, run: Run, *, is_kept: bool) -> None:
        run.ended_at = self.clock()
        with self._lock:
            self.version += 1
            del self._live[run.number]
            if is_kept:
                self.runs.append(run)
            usage = self.usage.setdefault(run.spec, Usage())
            for end in run.ends.values():
                usage.num_requests += 1
                usage.num_prompt_tokens += end.num_prompt_tokens or 0
                usage.num_cached_tokens += end.num_cached_tokens or 0
                usage.num_output_tokens += end.num_output_tokens
                usage.context_used = (end.num_prompt_tokens or 0) + end.num_output_tokens
        run.forget()
