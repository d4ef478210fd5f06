"""What a stream says, in this order for each request:

    Started . PrefillProgress* . (TextDelta | Notice)* . (Finished | Failed)

`LoadProgress` comes before all of them, when a model must be loaded first; `Waiting` may come at any moment.
A stream that raises or is closed ends without `Finished`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Union

if TYPE_CHECKING:
    from .errors import ResidentError
    from .telemetry import Timings

FinishReason = Literal["stop", "length"]
FiredBy = Literal["token", "string", "max_tokens", "context", "server"]
Channel = Literal["answer", "thinking"]


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Why a request ended, as in the OpenAI API, and what fired.

    id:   the stop token, if one fired
    text: the stop string, or the stop token as text
    """

    reason: FinishReason
    by: FiredBy
    id: int | None = None
    text: str | None = None

    def as_dict(self) -> dict[str, str | int]:
        """For the report: only what is known."""
        pairs = {"reason": self.reason, "by": self.by, "id": self.id, "text": self.text}
        return {key: value for key, value in pairs.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LoadProgress:
    """A model is being loaded: `done` of `total`, in bytes unless `unit` says otherwise."""

    done: int
    total: int
    what: str = "weights"
    unit: str = "bytes"


@dataclass(frozen=True, kw_only=True)
class Started:
    """The request's prompt is encoded and goes to the engine. num_prompt_tokens is None where only a server knows."""

    index: int
    num_prompt_tokens: int | None
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class PrefillProgress:
    """`num_done` of `num_total` prompt tokens have their KV, `num_cached` of them from before."""

    index: int
    num_done: int
    num_total: int
    num_cached: int = 0


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Nothing new yet: a sign of life, so that whoever drives the stream can look up. Never among the results.

    what: what is waited for, to follow "waiting for"
    """

    index: int
    what: str
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class TextDelta:
    """Text that is new and final; `num_tokens` output tokens so far, those without visible text included."""

    index: int
    text: str
    channel: Channel
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something the user should know while the request runs; also among the report's warnings."""

    index: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The request ended well.

    raw_text:        everything that the model wrote, tags and a stop string included
    is_cut_thinking: the token limit came before the thinking block closed
    """

    index: int
    finish: Finish
    raw_text: str
    is_cut_thinking: bool
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int
    timings: Timings
    warnings: tuple[str, ...] = ()
    details: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The request failed; the others of its batch go on."""

    index: int
    error: ResidentError


Event = Union[LoadProgress, Started, PrefillProgress, Waiting, TextDelta, Notice, Finished, Failed]
