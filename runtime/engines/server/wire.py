"""Bytes of a server in, steps out: server-sent events and the replies of OpenAI-compatible servers.

Everything here is push/flush on bytes and values, without a socket. The SSE decoder is our own, as the libraries for it
come with an HTTP client each and split lines on more than the standard's CR and LF.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ...errors import ContextOverflow, ModelNotFound, ResidentError, ServerError
from ...events import Finish
from ..base import DecodeStep, PrefillStep, StopEntry

MAX_EVENT_BYTES = 8_000_000
"""Most bytes of one event; more is no language model speaking."""

MAX_SHOWN = 300
"""Characters of a server's own words in an error."""

Endpoint = Literal["completions", "chat", "native"]
"""/v1/completions with ids, /v1/chat/completions with messages, or llama.cpp's own /completion with ids."""

_STOP_TYPES = {"eos": "stop", "word": "stop", "limit": "length"}
"""llama.cpp's reasons as finish reasons."""

_TOO_LONG = ("maximum context length", "max_model_len")
"""How servers say it that mark it in no other way."""

_LINE_END = re.compile(rb"\r\n|\n|\r")


class ServerEvent(NamedTuple):
    """One server-sent event: its name ("" for none) and its data lines joined by line feeds."""

    name: str
    data: str


class SseDecoder:
    """Bytes in any cut to events (WHATWG HTML, server-sent events): CR, LF or CR LF, comments dropped."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._name = b""
        self._num_held = 0
        self._is_after_cr = False

    def push(self, data: bytes) -> list[ServerEvent]:
        """Take new bytes; return the events that they complete. Raises ServerError on an endless event."""
        if self._is_after_cr and data.startswith(b"\n"):
            data = data[1:]
            self._is_after_cr = False
        if not data:
            return []
        self._is_after_cr = data.endswith(b"\r")
        if not _LINE_END.search(data):
            self._hold(len(data))
            self._tail += data
            return []
        *lines, self._tail = _LINE_END.split(self._tail + data)
        events: list[ServerEvent] = []
        for line in lines:
            self._take(line, events)
        self._num_held = len(self._tail) + sum(map(len, self._data))
        self._hold(0)
        return events

    def flush(self) -> list[ServerEvent]:
        """The stream ended: whole lines that no blank line followed still count, a cut line does not."""
        events: list[ServerEvent] = []
        self._tail = b""
        self._take(b"", events)
        return events

    def _hold(self, num_bytes: int) -> None:
        self._num_held += num_bytes
        if self._num_held > MAX_EVENT_BYTES:
            raise ServerError(
                f"The server sent one event of over {MAX_EVENT_BYTES} bytes. Is this address a language model?"
            )

    def _take(self, line: bytes, events: list[ServerEvent]) -> None:
        if not line:
            if self._data:
                events.append(ServerEvent(self._text(self._name), self._text(b"\n".join(self._data))))
            self._data, self._name = [], b""
            return
        name, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value

    @staticmethod
    def _text(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ServerError(f"The server sent bytes that are no UTF-8 ({error.reason} at {error.start}).") from None


class ReplyReader:
    """The events of one request to steps. The last step comes from `end`, as the counts follow the finish.

    stop:         the control tokens that end the answer; llama.cpp is not told them, so they are matched here
    stop_strings: what the server was told to stop at; it cuts them off, and the last step puts the one that fired back
    max_tokens:   what was asked for, to tell a limit from a full context
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        stop: tuple[StopEntry, ...] = (),
        stop_strings: tuple[str, ...] = (),
        max_tokens: int | None = None,
    ) -> None:
        self._stop_strings = stop_strings
        self._endpoint = endpoint
        self._stop = {entry.id: entry for entry in stop}
        self._max_tokens = max_tokens
        self._finish: Finish | None = None
        self._last_id: int | None = None
        self._stop_text = ""
        self._last: DecodeStep | None = None
        self._details: dict[str, object] = {}
        self.has_begun = False
        self.is_over = False

    def push(self, event: ServerEvent) -> list[DecodeStep | PrefillStep]:
        """The steps that an event brings; raises ServerError on an error event or nonsense. Sets `is_over`."""
        if event.data.strip() == "[DONE]":
            self.is_over = True
            return []
        try:
            body = json.loads(event.data)
        except (ValueError, RecursionError):
            raise ServerError(f"The server sent an event that is no JSON: {_shown(event.data)}") from None
        if not isinstance(body, dict):
            raise ServerError(f"The server sent an event that is no object: {_shown(event.data)}")
        if body.get("error") or event.name == "error":
            raise error_of(None, body)
        try:
            steps = self._native(body) if self._endpoint == "native" else self._openai(body)
        except (TypeError, KeyError, AttributeError, IndexError, ValueError, OverflowError) as error:
            raise ServerError(f"The server sent an event of a wrong shape ({error}): {_shown(event.data)}") from None
        self.has_begun = self.has_begun or any(isinstance(step, DecodeStep) for step in steps)
        return steps

    def end(self) -> DecodeStep:
        """The step that carries the finish and the counts; raises ServerError if the server named no finish."""
        if self._finish is None:
            raise ServerError("The server's answer broke off: it ended without a finish reason. Run the graph again.")
        last = self._last or DecodeStep(text="", num_tokens=0)
        return replace(last, text=last.text + self._stop_text, finish=self._finish, details=self._details)

    def _openai(self, body: dict[str, Any]) -> list[DecodeStep | PrefillStep]:
        self._count(body.get("usage"))
        if isinstance(timings := body.get("timings"), dict):
            self._details["server_timings"] = timings
        steps: list[DecodeStep | PrefillStep] = []
        for choice in body.get("choices") or ():
            thinking = ""
            if self._endpoint == "chat":
                delta = choice.get("delta") or {}
                text = _string(delta.get("content"))
                thinking = _string(delta.get("reasoning") or delta.get("reasoning_content"))
            else:
                text = _string(choice.get("text"))
            ids = _ids(choice.get("token_ids"))
            new = self._decoded(text, ids, thinking)
            if reason := choice.get("finish_reason"):
                self._end_by(reason, choice.get("stop_reason", choice.get("matched_stop")))
                self._last, new = new, None
            steps += [new] if new else []
        return steps

    def _native(self, body: dict[str, Any]) -> list[DecodeStep | PrefillStep]:
        if isinstance(progress := body.get("prompt_progress"), dict):
            counts = [int(progress[name]) for name in ("processed", "total", "cache")]
            return [PrefillStep(num_done=counts[0], num_total=counts[1], num_cached=counts[2])]
        new = self._decoded(_string(body.get("content")), _ids(body.get("tokens")), "")
        if self.is_over:
            return []
        if body.get("stop"):
            self._last, new = new, None
            self._details["num_prompt_tokens"] = int(body["tokens_evaluated"])
            self._details["num_output_tokens"] = int(body["tokens_predicted"])
            if isinstance(timings := body.get("timings"), dict):
                self._details["server_timings"] = timings
                if isinstance(cached := timings.get("cache_n"), int):
                    self._details["num_cached_tokens"] = cached
            kind = body.get("stop_type")
            self._end_by(_STOP_TYPES.get(str(kind), kind), body.get("stopping_word") or None)
            self.is_over = True
        return [new] if new else []

    def _decoded(self, text: str, ids: tuple[int, ...], thinking: str) -> DecodeStep | None:
        if not (text or ids or thinking):
            return None
        self._last_id = ids[-1] if ids else None
        if ids and self._endpoint == "native" and (entry := self._stop.get(ids[-1])):
            self._finish = Finish(reason="stop", by="token", id=entry.id, text=entry.text)
            self.is_over = True
            self._last = DecodeStep(text="", token_ids=ids)
            return None
        return DecodeStep(text=text, token_ids=ids, num_tokens=None if ids else 1, thinking=thinking)

    def _end_by(self, reason: object, cause: object) -> None:
        if reason == "length":
            self._finish = Finish(reason="length", by="context" if self._max_tokens is None else "max_tokens")
        elif reason != "stop":
            raise ServerError(f"The server ended the answer by {reason!r}, which is neither stop nor length.")
        elif isinstance(cause, str) and cause in self._stop_strings:
            self._finish = Finish(reason="stop", by="string", text=cause)
            self._stop_text = cause
        elif self._finish is None:
            self._finish = self._stopped(cause if isinstance(cause, int) else None)

    def _stopped(self, stop_id: int | None) -> Finish:
        """A stop by token if its id is told or can only be one, else by the server."""
        if stop_id is None and self._endpoint == "native" and len(self._stop) == 1:
            stop_id = next(iter(self._stop))
        if stop_id is None and self._last_id in self._stop:
            stop_id = self._last_id
        if stop_id is None:
            return Finish(reason="stop", by="server")
        entry = self._stop.get(stop_id)
        return Finish(reason="stop", by="token", id=stop_id, text=entry.text if entry else None)

    def _count(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        counts = {
            "num_prompt_tokens": usage.get("prompt_tokens"),
            "num_output_tokens": usage.get("completion_tokens"),
            "num_cached_tokens": cached,
        }
        self._details.update({name: count for name, count in counts.items() if isinstance(count, int)})


def error_of(status: int | None, body: object, *, retry_hint: str = "") -> ResidentError:
    """The error that a server's JSON tells: an object, a string, or `detail`, as servers differ."""
    kind, message, param = "", "", None
    if isinstance(body, dict):
        told = body.get("error") or body.get("detail") or body.get("message") or body
        if isinstance(told, dict):
            kind, param = str(told.get("type") or ""), told.get("param")
            told = told.get("message") or told
        message = told if isinstance(told, str) else json.dumps(told)
    else:
        message = str(body)
    said, low = _shown(message), message.lower()
    if kind == "exceed_context_size_error" or param == "input_tokens" or any(words in low for words in _TOO_LONG):
        return ContextOverflow(
            f"The server refused the prompt as too long: {said} "
            "Shorten the prompt, lower max_tokens, or start the server with a longer context."
        )
    if status == 404 and "model" in low and "not" in low:
        return ModelNotFound(f"The server does not have this model: {said} Pick one that it lists.")
    after = f" ({status})" if status else ""
    return ServerError(f"The server reported an error{after}: {said}{retry_hint}")


def _shown(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
    return text if text.endswith((".", "!", "?", "...")) else text + "."


def _string(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"text is {type(value).__name__}")
    return value


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise TypeError("token ids are no list of integers")
    return tuple(value)
