"""Ids to text while they come: whole characters only, and the same text however the ids were cut."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE_MARK = "\u2581"
"""How SentencePiece writes a space."""


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """What one token adds to the text.

    of:          the bytes of a token, given as the tokenizer spells it
    strip:       spaces that a text loses at its start
    first_token: the bytes of a token that begins a text
    """

    of: Callable[[str], bytes]
    first_token: Callable[[str], bytes]
    strip: int = 0


def _byte_level() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table, inverted)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + at): byte for at, byte in enumerate(moved)}


_BYTE_OF = _byte_level()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def _spaced(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return _spaced(token)


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """How this tokenizer's tokens become bytes; None for a decoder that does not work token by token."""
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"null"
    decoder = json.loads(state) or {}
    parts = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [part["type"] for part in parts if part["type"] != "Fuse"]
    strip = sum(part["start"] for part in parts if part["type"] == "Strip" and part["content"] == " ")
    if kinds == ["ByteLevel"]:
        return TokenBytes(of=_byte_level_bytes, first_token=_byte_level_bytes)
    if kinds == ["Metaspace"] and parts[0]["replacement"] == _SPACE_MARK:
        if parts[0].get("prepend_scheme", "always") == "never":
            return TokenBytes(of=_spaced, first_token=_spaced)
        return TokenBytes(of=_spaced, first_token=lambda token: token.replace(_SPACE_MARK, "").encode())
    if set(kinds) <= {"Replace", "ByteFallback", "Strip"} and kinds and _replaces_only_the_mark(parts):
        of = _byte_fallback if "ByteFallback" in kinds else _spaced
        return TokenBytes(of=of, first_token=of, strip=strip)
    return None


def _replaces_only_the_mark(parts: list[dict[str, object]]) -> bool:
    wanted = {"String": _SPACE_MARK}
    replaces = [part for part in parts if part["type"] == "Replace"]
    strips = [part for part in parts if part["type"] == "Strip"]
    return all(part["pattern"] == wanted and part["content"] == " " for part in replaces) and all(
        part["content"] == " " and part["stop"] == 0 for part in strips
    )


class Detokenizer:
    """Push ids, get the text that is new and final; `flush` gives what an unfinished character left.

    hidden: ids that give no text (control tokens)
    begins: the ids begin a text, so a space that the tokenizer put there is taken away
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] = (), *, begins: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._bytes = token_bytes(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = begins
        self._to_strip = self._bytes.strip if self._bytes and begins else 0
        self._window: list[int] = []
        self._window_text = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        if self._bytes is None:
            return self._push_window(ids)
        return self._strip("".join(self._utf8.decode(self._bytes_of(one)) for one in ids))

    def _bytes_of(self, token_id: int) -> bytes:
        assert self._bytes is not None
        token = None if token_id in self._hidden else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        of = self._bytes.first_token if self._is_first else self._bytes.of
        self._is_first = False
        return of(token)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text

    def _push_window(self, ids: Sequence[int]) -> str:
        """For any other decoder: decode the last tokens again with the new ones, and give the difference."""
        out: list[str] = []
        for one in ids:
            if one in self._hidden:
                continue
            self._window.append(one)
            text = self._decode(self._window)
            if text.endswith("\ufffd") and len(self._window) < 16:
                continue
            out.append(text[len(self._window_text) :])
            self._window = self._window[-4:]
            self._window_text = self._decode(self._window)
        return "".join(out)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def flush(self) -> str:
        """The ids ended: bytes of a character that never became whole, as U+FFFD."""
        if self._bytes is None:
            rest = self._decode(self._window)[len(self._window_text) :]
            self._window, self._window_text = [], ""
            return rest
        return self._strip(self._utf8.decode(b"", final=True))
