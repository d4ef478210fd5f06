"""Stop strings on streamed text: hold back what could still match, never leak a part."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopMatcher:
    """Pass text on up to the first stop string.

    The string that completes first wins; of two that complete together, the longer. So the result depends on
    the text, never on how it was cut. `matched` names the string once one is found, `rest` is the text
    that was pushed after it; nothing passes after that.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop_strings))
        self._held = ""
        self.matched: str | None = None
        self.rest = ""

    def push(self, text: str) -> str:
        """Take new text; return what is final: it cannot be part of a stop string any more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, _, self.matched = min(found)
            self._held, self.rest = "", text[end:]
            return text[: end - len(self.matched)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text ended: what was held back was no stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def parse_stop_strings(text: str) -> tuple[str, ...]:
    r"""Stop strings as a user types them: one a line, with the escapes \n, \t and \\; empty lines count for nothing.

    >>> parse_stop_strings("###\n\\n\\nUser:\n")
    ('###', '\n\nUser:')
    """
    lines = (line.rstrip("\r") for line in text.split("\n"))
    return tuple(re.sub(r"\\[nt\\]", lambda escape: _ESCAPES[escape.group()], line) for line in lines if line)
