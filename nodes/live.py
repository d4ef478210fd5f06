"""Live text: events in, messages for the browser out, at most 8 a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime.events import (
    Channel,
    Event,
    Failed,
    Finished,
    LoadProgress,
    Notice,
    PrefillProgress,
    Started,
    TextDelta,
    Waiting,
)
from ..runtime.telemetry import Clock, OutputTokens
from ..runtime.telemetry import clock as default_clock

MESSAGE_GAP_S = 1 / 8

Message = dict[str, Any]
"""index, num_items, seq, phase ("load", "prefill", "decode"), status, channel, delta, done; `is_snapshot` if `delta`
replaces all text of its index and channel."""


def _nowhere(message: Message, live: Live) -> None:
    pass


class Live:
    """What one node shows while it runs.

    Text is held back for up to an eighth of a second and sent together; the first message of a phase and the last
    of an item go at once. `status` is one line for people; `progress` is (done, total) for a progress bar.
    """

    def __init__(
        self,
        send: Callable[[Message, Live], None] = _nowhere,
        *,
        num_items: int = 1,
        clock: Clock = default_clock,
    ) -> None:
        self._send = send
        self._num_items = num_items
        self._clock = clock
        self._first = 0
        self._seq = 0
        self._sent_at = float("-inf")
        self._held: dict[tuple[int, Channel], list[str]] = {}
        self._text: dict[tuple[int, Channel], list[str]] = {}
        self._num_tokens = OutputTokens()
        self._rate_from: tuple[float, int] | None = None
        self._phase = ""
        self.status = ""
        self.progress: tuple[float, float] | None = None

    def begin_at(self, first: int) -> Live:
        """The next events count their items from `first` on."""
        self._first = first
        return self

    def take(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, LoadProgress):
            self.progress = (event.done, event.total)
            self._say("load", f"loading {100 * event.done // max(event.total, 1)} %")
            return
        index = self._first + event.index
        if isinstance(event, Started):
            self._num_tokens.allow(index, event.max_tokens)
            self._say("prefill", _prefill(0, event.num_prompt_tokens, 0), index)
        elif isinstance(event, PrefillProgress):
            self.progress = (event.num_done, event.num_total)
            self._say("prefill", _prefill(event.num_done, event.num_total, event.num_cached), index)
        elif isinstance(event, TextDelta):
            self._num_tokens[index] = event.num_tokens
            self._held.setdefault((index, event.channel), []).append(event.text)
            self._text.setdefault((index, event.channel), []).append(event.text)
            self._set_decode_progress()
            self._say("decode", self._rate(), index)
        elif isinstance(event, Waiting):
            self._say(self._phase, f"waiting for {event.what}, {event.waited_s:.0f} s", index)
        elif isinstance(event, Notice):
            self._say(self._phase, event.text, index)
        elif isinstance(event, (Finished, Failed)):
            self._end(event, index)

    def snapshots(self) -> list[Message]:
        """All text so far, for a page that has lost it; what was held back is part of it."""
        self._held.clear()
        return [
            {**self._message(index, channel, "".join(parts)), "is_snapshot": True}
            for (index, channel), parts in self._text.items()
        ] or [self._message(0, "answer", "")]

    def _say(self, phase: str, status: str, index: int = 0) -> None:
        is_new, self._phase, self.status = phase != self._phase, phase, status
        now = self._clock()
        if not is_new and now - self._sent_at < MESSAGE_GAP_S:
            return
        self._sent_at = now
        if self._held:
            (index, channel), parts = next(iter(self._held.items()))
            del self._held[index, channel]
            self._send(self._message(index, channel, "".join(parts)), self)
        else:
            self._send(self._message(index, "answer", ""), self)

    def _end(self, event: Finished | Failed, index: int) -> None:
        """The rest of an item's text, and that it is over."""
        self.status = _summary(event) if isinstance(event, Finished) else str(event.error)
        rest: list[tuple[Channel, str]] = []
        for channel in ("thinking", "answer"):
            if parts := self._held.pop((index, channel), None):
                rest.append((channel, "".join(parts)))
        rest = rest or [("answer", "")]
        for number, (channel, text) in enumerate(rest, 1):
            self._send({**self._message(index, channel, text), "done": number == len(rest)}, self)

    def _message(self, index: int, channel: Channel, delta: str) -> Message:
        seq, self._seq = self._seq, self._seq + 1
        return {
            "index": index,
            "num_items": self._num_items,
            "seq": seq,
            "phase": self._phase,
            "status": self.status,
            "channel": channel,
            "delta": delta,
            "done": False,
        }

    def _set_decode_progress(self) -> None:
        done, most = self._num_tokens.progress
        if most:
            self.progress = (done, most)

    def _rate(self) -> str:
        now, total = self._clock(), self._num_tokens.total
        if self._rate_from is None:
            self._rate_from = (now, total)
        since_s, before = now - self._rate_from[0], self._rate_from[1]
        tokens = "1 token" if total == 1 else f"{total} tokens"
        return f"{tokens}, {(total - before) / since_s:.1f} tok/s" if since_s > 0.2 else tokens


def _prefill(num_done: int, num_total: int | None, num_cached: int) -> str:
    if num_total is None:
        return "waiting for the first token"
    cached = f" ({num_cached} cached)" if num_cached else ""
    return f"prefill {num_done} of {num_total}{cached}"


def _summary(event: Finished) -> str:
    rate = event.timings.decode_tokens_per_s
    speed = f", {rate:.1f} tok/s" if rate else ""
    return f"{event.num_output_tokens} tokens{speed}, {event.finish.reason}"
