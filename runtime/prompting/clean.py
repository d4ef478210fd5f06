"""Cleaning rules for answers: each takes away one habit of models, is named in the report, and can be left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import InvalidValue

_QUOTES = (('"', '"'), ("'", "'"), ("\u201c", "\u201d"), ("\u00ab", "\u00bb"), ("`", "`"))

_FENCED = re.compile(r"\A.*?^ {0,3}```[^\n]*\n(.*?)\n? {0,3}```[ \t]*$.*\Z", re.DOTALL | re.MULTILINE)

_AGREES = r"(?:sure|certainly|of course|absolutely|okay|ok|great|got it)"
_PREAMBLE = re.compile(
    rf"\A(?:{_AGREES}[,.! ]+)*(?:here(?:'s|\u2019s| is| are)|below (?:is|are)|this is)\b[^\n:]{{0,160}}:\s*"
    rf"|\A{_AGREES}[,.!]*[ \t]*\n+",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"\A[*_#\s]*(?:(?:image|video|positive|negative|final|new|rewritten|english|sdxl|flux)\s+)*"
    r"(?:prompt|translation|description|answer)[*_]*\s*:[*_]*\s*",
    re.IGNORECASE,
)


def _fences(text: str) -> str:
    return _FENCED.sub(r"\1", text) if text.count("```") == 2 else text


def _quotes(text: str) -> str:
    for start, end in _QUOTES:
        inner = text[1:-1]
        if len(text) > 1 and text[0] == start and text[-1] == end and start not in inner and end not in inner:
            return inner
    return text


def _markdown(text: str) -> str:
    text = re.sub(r"(\*\*|__)(?=\S)(.+?)(?<=\S)\1", r"\2", text)
    return re.sub(r"^#{1,6} +", "", text, flags=re.MULTILINE)


def _numbering(text: str) -> str:
    return re.sub(r"^[ \t]*(?:\d{1,3}[.):]|[-*\u2022])[ \t]+", "", text, flags=re.MULTILINE)


def _tags(text: str) -> str:
    first: dict[str, str] = {}
    for part in re.split(r"[,\n]", text):
        tag = part.strip().rstrip(".")
        first.setdefault(tag.lower(), tag)
    return ", ".join(tag for tag in first.values() if tag)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One cleaning rule; `about` says in a few words what it takes away."""

    name: str
    about: str
    apply: Callable[[str], str]


RULES = (
    Rule(name="fences", about="what stands around a single ``` block, and its fences", apply=_fences),
    Rule(
        name="preamble", about='a first line such as "Here is your prompt:"', apply=lambda text: _PREAMBLE.sub("", text)
    ),
    Rule(name="label", about='a label such as "Prompt:"', apply=lambda text: _LABEL.sub("", text)),
    Rule(name="markdown", about="bold marks and headings", apply=_markdown),
    Rule(name="quotes", about="quotes around the whole answer", apply=_quotes),
    Rule(name="numbering", about="list numbers and bullets", apply=_numbering),
    Rule(name="tags", about="line ends, doubled tags and full stops in a list of tags", apply=_tags),
    Rule(name="one_line", about="line ends and doubled spaces", apply=lambda text: " ".join(text.split())),
)
"""In the order in which they are applied."""


def clean(text: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """The text after the rules of these names, and which of them changed it; raises InvalidValue for an unknown name.

    >>> clean('Sure! Here is your prompt:\\n"a red fox"', ["quotes", "preamble"])
    ('a red fox', ['preamble', 'quotes'])
    """
    if unknown := set(names) - {rule.name for rule in RULES}:
        known = ", ".join(rule.name for rule in RULES)
        raise InvalidValue(f"There is no cleaning rule {', '.join(sorted(unknown))}. Rules are: {known}.")
    changed = []
    for rule in RULES:
        if rule.name in names:
            before = text.strip()
            text = rule.apply(before).strip()
            changed += [rule.name] if text != before else []
    return text, changed
