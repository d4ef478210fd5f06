"""The length of a request, known before any work."""

from __future__ import annotations

from ..errors import ContextOverflow


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, context_len: int) -> int:
    """Output tokens that the request may have; raises ContextOverflow with the numbers.

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
            "which must hold at least one more for the answer. Shorten the prompt, or load the model with a longer "
            "context."
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextOverflow(
            f"Prompt of {num_prompt_tokens} tokens + max_tokens {max_tokens} is {max_tokens - room} over the context "
            f"of {context_len}. Set max_tokens to {room} or less, or load the model with a longer context."
        )
    return max_tokens
