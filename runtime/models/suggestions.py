"""Models to begin with, by the memory of the card: public instruct models, downloadable without an account."""

from __future__ import annotations

from dataclasses import dataclass

from ..shell import for_shell
from ..telemetry import format_bytes

RESERVE_BYTES = 2_000_000_000
"""Kept for KV cache, scratch and the screen."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A repository of the hub. num_bytes is about what its weights are, on disk and on the card."""

    repo: str
    num_bytes: int
    licence: str = "Apache-2.0"

    @property
    def needs(self) -> str:
        """What must run it, where that is not any engine."""
        return ", for ExLlamaV2 or a server" if self.repo.endswith("-AWQ") else ""


SUGGESTIONS = tuple(
    Suggestion(repo=repo, num_bytes=int(gigabytes * 1e9))
    for repo, gigabytes in (
        ("HuggingFaceTB/SmolLM2-360M-Instruct", 0.72),
        ("Qwen/Qwen3-0.6B", 1.5),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 3.4),
        ("Qwen/Qwen3-1.7B", 4.1),
        ("Qwen/Qwen3-4B-Instruct-2507", 8.0),
        ("Qwen/Qwen3-8B-AWQ", 6.1),
        ("Qwen/Qwen3-14B-AWQ", 10.0),
        ("Qwen/Qwen3-8B", 16.4),
        ("Qwen/Qwen3-32B-AWQ", 19.3),
        ("Qwen/Qwen3-14B", 29.5),
    )
)
"""From small to large in what they can do."""


def suggest(memory_bytes: int | None, count: int = 3) -> tuple[Suggestion, ...]:
    """The largest that fit, largest last; the smallest ones where the memory is not known or too small."""
    room = (memory_bytes or 0) - RESERVE_BYTES
    fitting = [one for one in SUGGESTIONS if one.num_bytes <= room]
    return tuple(fitting[-count:] if len(fitting) >= count else SUGGESTIONS[:count])


def advice(memory_bytes: int | None, into: str | None = None) -> str:
    """A sentence with models to begin with and the command that fetches one, into a folder if one is named."""
    chosen = suggest(memory_bytes)
    names = ", ".join(f"{one.repo} (about {format_bytes(one.num_bytes)}{one.needs})" for one in chosen)
    where = f" for a card of {format_bytes(memory_bytes)}" if memory_bytes else ""
    plain = [one for one in chosen if not one.needs] or chosen
    fetch = for_shell("python -m runtime download", plain[-1].repo, *(("--into", into) if into else ()))
    return f"Good ones to begin with{where}: {names}. Fetch one with: {fetch}"
