"""Models to begin with, by the memory of the card: public instruct models, downloadable without an account."""

from __future__ import annotations

from dataclasses import dataclass

from ..telemetry import format_bytes

RESERVE_BYTES = 2_000_000_000
"""Kept for KV cache, scratch and the screen."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A repository of the hub. num_bytes is about what its weights are, on disk and on the card.

    only: the pattern of the one file to fetch, where the repository holds the model in several precisions
    """

    repo: str
    num_bytes: int
    only: str = ""
    licence: str = "Apache-2.0"

    @property
    def runs_in(self) -> str:
        """What runs it; "" for any engine."""
        return next((title for ending, title in _RUNS_IN.items() if self.repo.endswith(ending)), "")

    @property
    def arguments(self) -> str:
        """What `python -m runtime download` takes to fetch it."""
        return self.repo + (f' --only "{self.only}"' if self.only else "")


_RUNS_IN = {"-GGUF": "llama.cpp", "-AWQ": "ExLlamaV2 or a server"}

SUGGESTIONS = tuple(
    Suggestion(repo=repo, num_bytes=int(gigabytes * 1e9), only=only)
    for repo, gigabytes, only in (
        ("HuggingFaceTB/SmolLM2-360M-Instruct", 0.72, ""),
        ("Qwen/Qwen3-0.6B", 1.5, ""),
        ("Qwen/Qwen3-1.7B-GGUF", 1.8, "*Q8_0*"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 3.4, ""),
        ("Qwen/Qwen3-1.7B", 4.1, ""),
        ("Qwen/Qwen3-4B-GGUF", 2.5, "*Q4_K_M*"),
        ("Qwen/Qwen3-4B-Instruct-2507", 8.0, ""),
        ("Qwen/Qwen3-8B-GGUF", 5.0, "*Q4_K_M*"),
        ("Qwen/Qwen3-8B-AWQ", 6.1, ""),
        ("Qwen/Qwen3-14B-GGUF", 9.0, "*Q4_K_M*"),
        ("Qwen/Qwen3-14B-AWQ", 10.0, ""),
        ("Qwen/Qwen3-8B", 16.4, ""),
        ("Qwen/Qwen3-32B-GGUF", 19.8, "*Q4_K_M*"),
        ("Qwen/Qwen3-32B-AWQ", 19.3, ""),
        ("Qwen/Qwen3-14B", 29.5, ""),
    )
)
"""From small to large in what they can do."""


def suggest(memory_bytes: int | None, count: int = 3) -> tuple[Suggestion, ...]:
    """The largest that fits of each kind, then the next largest for any engine, the best last; the smallest ones
    where the memory is not known or too small."""
    room = (memory_bytes or 0) - RESERVE_BYTES
    fitting = [one for one in SUGGESTIONS if one.num_bytes <= room]
    best = list({one.runs_in: one for one in fitting}.values())
    others = [one for one in reversed(fitting) if one not in best]
    others.sort(key=lambda one: one.runs_in != "")
    chosen = [*best, *others][:count]
    return tuple(sorted(chosen, key=SUGGESTIONS.index)) if len(chosen) == count else SUGGESTIONS[:count]


def advice(memory_bytes: int | None) -> str:
    """A sentence with models to begin with and the command that fetches one."""
    chosen = suggest(memory_bytes)
    names = ", ".join(f"{one.repo} (about {format_bytes(one.num_bytes)}{_kind(one)})" for one in chosen)
    where = f" for a card of {format_bytes(memory_bytes)}" if memory_bytes else ""
    plain = [one for one in chosen if not one.runs_in] or chosen
    return f"Good ones to begin with{where}: {names}. Fetch one with: python -m runtime download {plain[-1].arguments}"


def _kind(one: Suggestion) -> str:
    return f", for {one.runs_in}" if one.runs_in else ""
