"""Prompts made to length, exactly in tokens, and the set of 25 prompts for quality."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..engines.base import Encoded
from ..errors import InvalidValue
from ..request import Message, Prompt

WORDS = """
light river stone quiet forest window morning silver garden shadow winter harbour copper velvet
lantern meadow distant paper marble orchard thunder gentle ivory market bridge feather crimson
valley candle northern ocean painted hollow amber mountain glass slender autumn mirror tower golden
station misty ribbon ancient cedar
""".split()
FILLERS = (" a", " I", ".", " the", ",", "\n", " x", "-")
SALT_LENGTH = 4


def prompt_of_length(encode: Callable[[Prompt], Encoded], num_tokens: int, *, seed: int) -> Prompt:
    """A prompt that `encode` turns into exactly `num_tokens` ids; another seed gives other words from the start.

    An engine that does not tell its ids gets the same text as one whose tokenizer takes a token a word. Raises
    InvalidValue where the template alone is longer, or no filler meets the length.
    """
    words = _words(seed, num_tokens)

    def count(num_words: int, tail: str = "") -> int | None:
        return encode(_prompt(words[:num_words], tail)).num_tokens

    least = count(SALT_LENGTH)
    if least is None:
        return _prompt(words[: max(SALT_LENGTH, num_tokens)], "")
    if least > num_tokens:
        raise InvalidValue(
            f"The chat template alone takes about {least} tokens, which is over the length of {num_tokens} asked for. "
            f"Measure at {least} tokens or more."
        )
    low, high = _range_of_words(count, num_tokens, len(words))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if (count(middle) or 0) <= num_tokens else (low, middle - 1)
    for num_words in range(low, max(SALT_LENGTH - 1, low - 4), -1):
        for filler in FILLERS:
            for tail in _tails(filler, num_tokens - (count(num_words) or 0)):
                if count(num_words, tail) == num_tokens:
                    return _prompt(words[:num_words], tail)
    raise InvalidValue(f"No text of exactly {num_tokens} tokens was found for this tokenizer. Try another length.")


def _range_of_words(count: Callable[[int], int | None], num_tokens: int, most: int) -> tuple[int, int]:
    """Between which numbers of words the length lies, by the tokens that the first words take: fewer long texts."""
    few = min(most, SALT_LENGTH + 60)
    at_least, at_few = count(SALT_LENGTH) or 0, count(few) or 0
    if few == SALT_LENGTH or at_few >= num_tokens:
        return SALT_LENGTH, few
    guess = few + (num_tokens - at_few) * (few - SALT_LENGTH) / max(1, at_few - at_least)
    low, high = min(most, int(0.9 * guess)), min(most, int(1.1 * guess) + 8)
    return (
        low if (count(low) or 0) <= num_tokens else SALT_LENGTH,
        high if high == most or (count(high) or 0) > num_tokens else most,
    )


def _tails(filler: str, missing: int) -> Iterator[str]:
    yield filler * missing
    for extra in (1, 2, 3):
        yield filler * (missing + extra)


def _words(seed: int, num_words: int) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(WORDS) for _ in range(max(num_words, SALT_LENGTH))]


def _prompt(words: list[str], tail: str) -> Prompt:
    return Prompt.of(" ".join(words) + tail)


@dataclass(frozen=True, kw_only=True)
class QualityPrompt:
    """One of the 25: its kind, and the conversation."""

    kind: str
    prompt: Prompt


def quality_prompts() -> tuple[QualityPrompt, ...]:
    """Five kinds of five: image prompts, code, mathematics, Chinese (classical and modern), long conversations."""
    rows = json.loads((Path(__file__).parent / "quality_prompts.json").read_text(encoding="utf-8"))
    return tuple(
        QualityPrompt(
            kind=row["kind"],
            prompt=Prompt(messages=tuple(Message.of(role, _long(text)) for role, text in row["messages"])),
        )
        for row in rows
    )


def _long(text: str | dict[str, object]) -> str:
    """A text as it stands, or {"words": N, "then": question}: N words drawn by a fixed seed, then the question."""
    if isinstance(text, str):
        return text
    num_words, then = int(str(text["words"])), str(text["then"])
    return " ".join(_words(num_words, num_words)) + "\n\n" + then
