"""Thinking: which marks a model puts around it, and streamed text split into thinking and answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..engines.base import Reasoning
from ..events import Channel
from .stop import StopMatcher

Parts = list[tuple[Channel, str]]

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Pairs that models are trained on; the first is assumed where nothing is known."""

CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""How gpt-oss writes a reply: start, role, channel, its name, message, text, end (openai-harmony's format)."""

CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
FINAL_CHANNEL = "<|channel|>final<|message|>"


def find_tags(template: str, added: Collection[str]) -> tuple[str, str]:
    """The (open, close) marks of a model, from its added tokens and its template's text."""
    if {"<|channel|>", "<|message|>", "<|end|>"} <= set(added):
        return CHANNELS
    for where in (added, template):
        for tags in TAGS:
            if all(tag in where for tag in tags):
                return tags
    return TAGS[0]


def marks_of(tags: tuple[str, str]) -> tuple[str, ...]:
    """The control tokens that must come out as text, so that thinking can be told from the answer."""
    return CHANNEL_MARKS if tags == CHANNELS else tags


class Splitter(Protocol):
    """Push text, get it back in parts; `is_open` while the model thinks."""

    @property
    def is_open(self) -> bool: ...

    def push(self, text: str) -> Parts: ...

    def flush(self) -> Parts: ...


def splitter(reasoning: Reasoning | None) -> Splitter:
    """The splitter of a request's answer."""
    if reasoning is not None and (reasoning.open_tag, reasoning.close_tag) == CHANNELS:
        return ChannelSplitter(reasoning.is_open)
    return ReasoningSplitter(reasoning)


class ReasoningSplitter:
    """Route text to "thinking" or "answer" by where the block opened; no character is lost but the tags.

    A close tag where no block is open is text, and so is an open tag inside a code fence or right behind a backtick.
    """

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._reasoning = reasoning
        self.is_open = bool(reasoning and reasoning.is_open)
        self._fence = _Fence()
        self._matcher = self._next_matcher()

    def _next_matcher(self) -> StopMatcher:
        if self._reasoning is None:
            return StopMatcher(())
        return StopMatcher((self._reasoning.close_tag if self.is_open else self._reasoning.open_tag,))

    def push(self, text: str) -> Parts:
        """Take new text; return what is final, in order."""
        out: Parts = []
        while True:
            self._add(out, self._matcher.push(text))
            tag = self._matcher.matched
            if tag is None:
                return out
            text = self._matcher.rest
            if not self.is_open and self._fence.is_code:
                self._add(out, tag)
            else:
                self.is_open = not self.is_open
            self._matcher = self._next_matcher()

    def _add(self, out: Parts, text: str) -> None:
        if not text:
            return
        if not self.is_open:
            self._fence.push(text)
        out.append(("thinking" if self.is_open else "answer", text))

    def flush(self) -> Parts:
        """The text ended: return what was held back."""
        out: Parts = []
        self._add(out, self._matcher.flush())
        return out


class _Fence:
    """Whether the text so far ends inside a fenced code block, or right behind a backtick."""

    def __init__(self) -> None:
        self._is_open = False
        self._line = ""

    def push(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._is_open ^= line.lstrip().startswith("```")

    @property
    def is_code(self) -> bool:
        return self._is_open or self._line.endswith("`")


class ChannelSplitter:
    """gpt-oss: what stands in the channel "final" is the answer, what stands in another one is thinking.

    Marks and headers give no text. A reply without any mark is an answer.
    """

    def __init__(self, is_open: bool) -> None:
        self._channel: Channel = "thinking" if is_open else "answer"
        self._header: str | None = None
        self._matcher = StopMatcher(CHANNEL_MARKS)

    @property
    def is_open(self) -> bool:
        """Whether no answer is being written: also between two messages of the model."""
        return self._header is not None or self._channel == "thinking"

    def push(self, text: str) -> Parts:
        """Take new text; return what is final, in order."""
        out: Parts = []
        while True:
            self._add(out, self._matcher.push(text))
            if self._matcher.matched is None:
                return out
            self._turn(self._matcher.matched)
            text, self._matcher = self._matcher.rest, StopMatcher(CHANNEL_MARKS)

    def _add(self, out: Parts, text: str) -> None:
        if self._header is not None:
            self._header += text
        elif text:
            out.append((self._channel, text))

    def _turn(self, mark: str) -> None:
        if mark == "<|message|>":
            name = (self._header or "").partition("<|channel|>")[2].split()
            self._channel = "thinking" if name and name[0] != "final" else "answer"
            self._header = None
        elif mark == "<|start|>":
            self._header = ""
        elif mark == "<|channel|>":
            self._header = (self._header or "") + mark
        elif self._header is not None:
            self._header += " "

    def flush(self) -> Parts:
        """The text ended: return what was held back."""
        out: Parts = []
        self._add(out, self._matcher.flush())
        return out
