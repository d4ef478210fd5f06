"""Split streamed text into thinking and answer."""

from __future__ import annotations

from ..engines.base import Reasoning
from ..events import Channel
from .stop import StopMatcher


class ReasoningSplitter:
    """Route text to "thinking" or "answer" by where the block opened; no character is lost but the tags."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._reasoning = reasoning
        self.is_open = bool(reasoning and reasoning.is_open)
        self._matcher = self._next_matcher()

    def _next_matcher(self) -> StopMatcher:
        if self._reasoning is None:
            return StopMatcher(())
        return StopMatcher((self._reasoning.close_tag if self.is_open else self._reasoning.open_tag,))

    def push(self, text: str) -> list[tuple[Channel, str]]:
        """Take new text; return what is final, in order."""
        out: list[tuple[Channel, str]] = []
        while True:
            before = self._matcher.push(text)
            if before:
                out.append(("thinking" if self.is_open else "answer", before))
            if self._matcher.matched is None:
                return out
            self.is_open = not self.is_open
            text = self._matcher.rest
            self._matcher = self._next_matcher()

    def flush(self) -> list[tuple[Channel, str]]:
        """The text ended: return what was held back."""
        rest = self._matcher.flush()
        return [("thinking" if self.is_open else "answer", rest)] if rest else []
