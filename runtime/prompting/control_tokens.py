"""Encode a rendered prompt so that what the user typed never becomes a control token.

Before the template is rendered, risky characters of user text are swapped one for one against private-use
characters that occur nowhere else; they travel through the template, and where they come out is user text. The
prompt is then encoded as transformers would encode it, and only the tokens that turn user text into an added
token are replaced, by the ids of the same characters without special parsing. Every other id stays as it is.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..errors import TemplateFailed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Mark = Callable[[str], str]
Render = Callable[[Mark], str]
"""Builds the prompt's text, passing each piece of user text through the mark."""

Span = tuple[int, int]

_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlTokens:
    """The added tokens of one tokenizer, and the encoder that keeps user text apart from them.

    Tokens of white space only are no structure: they are how some tokenizers spell spaces and line ends.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.texts = {one: token.content for one, token in added.items() if token.content.strip()}
        self._lengths: dict[str, set[int]] = {}
        for text in self.texts.values():
            self._lengths.setdefault(text[0], set()).add(len(text))
        self._known = frozenset(self.texts.values())
        self._alphabet = frozenset(chain.from_iterable(self.texts.values()))
        self._is_risky: dict[str, bool] = {}
        self._plain, self._has_prefix = _plain_tokenizer(tokenizer)
        unknown = self._plain.encode("\U0010fffd", add_special_tokens=False).ids
        self._unk = unknown[0] if len(unknown) == 1 else None

    # Marking

    def _risky(self, char: str) -> bool:
        """Whether a character can be a part of an added token, as it stands or once normalised."""
        if char not in self._is_risky:
            normalizer = self._tokenizer.normalizer
            seen = normalizer.normalize_str(char) if normalizer is not None else char
            is_part = char in self._alphabet or not seen or not self._alphabet.isdisjoint(seen)
            self._is_risky[char] = is_part and not char.isspace()
        return self._is_risky[char]

    def _literals(self, text: str) -> Iterator[Span]:
        """Where user text alone spells an added token; spans may overlap."""
        for first, lengths in self._lengths.items():
            start = text.find(first)
            while start >= 0:
                found = [n for n in lengths if text[start : start + n] in self._known]
                if found:
                    yield start, start + max(found)
                start = text.find(first, start + 1)
        if any(self._risky(char) and char not in self._alphabet for char in set(text)):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            yield from (span for one, span in zip(encoding.ids, encoding.offsets) if one in self.texts)

    def encode(self, render: Render, user_texts: Sequence[str], template: str) -> tuple[str, tuple[int, ...]]:
        """The rendered text with its ids; raises what `render` raises.

        user_texts, template: all that goes into the rendering, to find characters that occur nowhere in it
        """
        for one in user_texts:
            _check_whole(one)
        marks = _Marks(chain(template, *user_texts))
        literal_text = render(lambda text: marks.swap(text, self._literals(text)))
        text, literal_spans = marks.restore(literal_text)
        if not any(map(self._risky, set(chain(*user_texts)))):
            return text, self._encode(text, literal_spans, literal_text)
        try:
            risky_text = render(lambda text: marks.swap_chars(text, self._risky))
        except TemplateFailed:  # it looks into the text and misses what is hidden
            return text, self._encode(text, literal_spans, literal_text)
        same, risky_spans = marks.restore(risky_text)
        if same != text and self._structure(literal_text) == self._structure(risky_text):
            return text, self._encode(text, literal_spans, literal_text)
        return same, self._encode(same, risky_spans, risky_text)

    # Encoding

    def _structure(self, marked: str) -> list[int]:
        """The control tokens of a marked text: those of the template alone."""
        return [one for one in self._tokenizer.encode(marked, add_special_tokens=False).ids if one in self.texts]

    def _encode(self, text: str, spans: list[Span], marked: str) -> tuple[int, ...]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        users = [at for at, one in enumerate(ids) if self._is_structure(one, text, offsets[at])]
        users = [at for at in users if _marked(spans, offsets[at])]
        if not users:
            return tuple(ids)
        if any(_holds_others(text, spans, offsets[at]) for at in users):
            return tuple(self._encode_apart(text, marked))
        return tuple(self._replace(text, ids, offsets, users))

    def _is_structure(self, one: int, text: str, span: Span) -> bool:
        """An added token; not `unk` for an unknown character, which is so by need and not by the user's writing it."""
        return one in self.texts and (one != self._unk or self._spells(one, text[slice(*span)]))

    def _spells(self, one: int, text: str) -> bool:
        normalizer = self._tokenizer.normalizer
        seen = normalizer.normalize_str(text) if normalizer is not None else text
        return self.texts[one] in text or self.texts[one] in seen

    def _replace(self, text: str, ids: list[int], offsets: list[Span], users: list[int]) -> Iterator[int]:
        """The ids with those of `users` in plain characters.

        Where the tokenizer would put a space before the text behind an added token, that text is encoded anew.
        """
        done = 0
        for at in users:
            yield from ids[done:at]
            yield from self.plain(text[slice(*offsets[at])])
            done = at + 1
            if self._has_prefix:
                while done < len(ids) and ids[done] not in self.texts:
                    done += 1
                yield from self.plain(text[offsets[at][1] : offsets[done][0] if done < len(ids) else len(text)])
        yield from ids[done:]

    def _encode_apart(self, text: str, marked: str) -> Iterator[int]:
        """For user text that runs into the template's own tokens: find those alone, encode the rest plainly."""
        encoding = self._tokenizer.encode(marked, add_special_tokens=False)
        done = 0
        for one, (start, end) in zip(encoding.ids, encoding.offsets):
            if one in self.texts and one != self._unk:
                yield from self.plain(text[done:start])
                yield one
                done = end
        yield from self.plain(text[done:])

    def plain(self, text: str) -> Iterator[int]:
        """The ids of a text as characters: never an added token, never a space put before it."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        for one, span in zip(encoding.ids, encoding.offsets):
            if self._is_structure(one, text, span):
                yield from chain.from_iterable(map(self._char, text[slice(*span)]))
            else:
                yield one

    def _char(self, char: str) -> list[int]:
        ids = self._plain.encode(char, add_special_tokens=False).ids
        if not any(one in self.texts and one != self._unk for one in ids):
            return ids
        as_bytes = [self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
        if all(one is not None and one not in self.texts for one in as_bytes):
            return [one for one in as_bytes if one is not None]
        raise TemplateFailed(
            f"The text holds {char!r}, which this model can only read as a control token. Leave it out."
        )


class _Marks:
    """Private-use characters that stand for others; none of them occurs in `taken`."""

    def __init__(self, taken: Iterable[str]) -> None:
        used = set(taken)
        self._free = (chr(code) for code in chain(*_PRIVATE) if chr(code) not in used)
        self._mark: dict[str, str] = {}

    def _of(self, char: str) -> str:
        if char not in self._mark:
            self._mark[char] = next(self._free)
        return self._mark[char]

    def swap(self, text: str, spans: Iterable[Span]) -> str:
        """The text with the characters of the spans marked."""
        chars = list(text)
        for start, end in spans:
            chars[start:end] = map(self._of, text[start:end])
        return "".join(chars)

    def swap_chars(self, text: str, wanted: Callable[[str], bool]) -> str:
        return text.translate({ord(char): self._of(char) for char in set(text) if wanted(char)})

    def restore(self, marked: str) -> tuple[str, list[Span]]:
        """The text with its characters back, and the sorted spans that were marked."""
        if not self._mark:
            return marked, []
        pattern = "[" + "".join(self._mark.values()) + "]+"
        spans = [match.span() for match in re.finditer(pattern, marked)]
        return marked.translate({ord(mark): char for char, mark in self._mark.items()}), spans


def _check_whole(text: str) -> None:
    """Raise TemplateFailed for half of a surrogate pair, which no tokenizer can read."""
    if half := re.search("[\ud800-\udfff]", text):
        where = f"U+{ord(half.group()):04X}) at position {half.start() + 1}"
        raise TemplateFailed(f"The text holds half a character ({where}. Type it anew.")


def _marked(spans: list[Span], span: Span) -> list[Span]:
    """Those of the sorted spans that overlap one."""
    first = bisect.bisect_right(spans, span[0], key=lambda one: one[1])
    last = bisect.bisect_left(spans, span[1], lo=first, key=lambda one: one[0])
    return spans[first:last]


def _holds_others(text: str, spans: list[Span], span: Span) -> bool:
    """Whether a span holds visible characters that no mark covers."""
    covered = {at for start, end in _marked(spans, span) for at in range(start, end)}
    return any(not text[at].isspace() and at not in covered for at in range(*span))


def _plain_tokenizer(tokenizer: Tokenizer) -> tuple[Tokenizer, bool]:
    """A tokenizer over the same model, without added tokens and without a space put before a text.

    With it, whether the full one puts that space before each text between two added tokens.
    """
    from tokenizers import Tokenizer as New

    state = {
        "normalizer": _state(tokenizer.normalizer),
        "pre_tokenizer": _state(tokenizer.pre_tokenizer),
    }
    found: list[bool] = []
    bare = {key: _without_prefix(value, found) for key, value in state.items()}
    shell = New.from_str(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "post_processor": None, "decoder": None}
            | {"truncation": None, "padding": None, "model": {"type": "BPE", "vocab": {}, "merges": []}}
            | bare
        )
    )
    plain = New(tokenizer.model)
    if shell.normalizer is not None:
        plain.normalizer = shell.normalizer
    if shell.pre_tokenizer is not None:
        plain.pre_tokenizer = shell.pre_tokenizer
    return plain, any(found)


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _without_prefix(part: Any, found: list[bool]) -> Any:
    """A normalizer or pre-tokenizer, as JSON, without its prefix space; notes in `found` where there was one."""
    if part is None:
        return None
    kind = part["type"]
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [_without_prefix(one, found) for one in part[key]]
        return {**part, key: [one for one in inner if one is not None]}
    if kind == "Prepend":
        found.append(True)
        return None
    if kind == "Metaspace":
        found.append(part.get("prepend_scheme", "always") == "always")
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        found.append(bool(part.get("add_prefix_space")))
        return {**part, "add_prefix_space": False}
    return part
