"""The length of a request, known before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..engines.base import Encoded, EngineInfo
from ..errors import ContextOverflow
from ..request import Prompt, Request

MAX_RESERVE = 1024
"""Tokens kept free for an answer without a limit when history is dropped; a quarter of a smaller context."""


LONGER = "load the model with a longer context"


def longer_context(info: EngineInfo) -> str:
    """What would give a longer context, for a sentence; empty where the model was made for no more."""
    if info.capabilities.is_remote:
        return "start the server with a longer context"
    if info.made_for is None or info.context_len is None:
        return LONGER
    return f"{LONGER}, up to {info.made_for}" if info.context_len < info.made_for else ""


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, context_len: int, longer: str = LONGER) -> int:
    """Output tokens that the request may have; raises ContextOverflow with the numbers, and with `longer` as a way out.

    >>> resolve_max_tokens(60, None, 64)
    4
    >>> resolve_max_tokens(60, 8, 64)
    Traceback (most recent call last):
    ...
    runtime.errors.ContextOverflow: Prompt of 60 tokens + max_tokens 8 is 4 over the context of 64. \
Set max_tokens to 4 or less, or load the model with a longer context.
    """
    room = context_len - num_prompt_tokens
    if room < 1:
        raise ContextOverflow(
            f"Prompt of {num_prompt_tokens} tokens is {1 - room} too long for the context of {context_len}, "
            f"which must hold at least one more for the answer. Shorten the prompt{f', or {longer}' if longer else ''}."
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextOverflow(
            f"Prompt of {num_prompt_tokens} tokens + max_tokens {max_tokens} is {max_tokens - room} over the context "
            f"of {context_len}. Set max_tokens to {room} or less, or {longer or 'shorten the prompt'}."
        )
    return max_tokens


def fit(
    encode: Callable[[Prompt], Encoded], request: Request, context_len: int | None, longer: str = LONGER
) -> tuple[Encoded, int | None]:
    """The encoded prompt and its output tokens; drops the oldest turns if the prompt asks for that and it must be.

    Raises ContextOverflow where it cannot fit, and what `encode` raises. Where the length is not known here (a
    server encodes), the request's own limit comes back.
    """
    prompt = request.prompt
    encoded = encode(prompt)
    if encoded.num_tokens is None or context_len is None:
        return encoded, request.max_tokens
    if not prompt.drop_history:
        return encoded, resolve_max_tokens(encoded.num_tokens, request.max_tokens, context_len, longer)
    most = context_len - (request.max_tokens or min(MAX_RESERVE, context_len // 4))
    turns = _droppable(prompt)
    if encoded.num_tokens > most and turns:
        # More turns dropped never make a prompt longer: search the least number that fits.
        few, many = 1, len(turns)
        while few < many:
            middle = (few + many) // 2
            if (encode(_without(prompt, turns[:middle])).num_tokens or 0) <= most:
                many = middle
            else:
                few = middle + 1
        dropped = sum(map(len, turns[:few]))
        encoded = encode(_without(prompt, turns[:few]))
        note = f"{dropped} of the oldest messages were dropped to fit the context of {context_len} tokens."
        encoded = dataclasses.replace(encoded, notes=(*encoded.notes, note))
    return encoded, resolve_max_tokens(encoded.num_tokens or 0, request.max_tokens, context_len, longer)


def _droppable(prompt: Prompt) -> list[list[int]]:
    """The turns that may go, oldest first, as positions of their messages: all but system and the last turn."""
    turns: list[list[int]] = []
    for at, message in enumerate(prompt.messages):
        if message.role == "system":
            continue
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(at)
    return turns[:-1]


def _without(prompt: Prompt, turns: list[list[int]]) -> Prompt:
    gone = {at for turn in turns for at in turn}
    kept = tuple(message for at, message in enumerate(prompt.messages) if at not in gone)
    return dataclasses.replace(prompt, messages=kept)
