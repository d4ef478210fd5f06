"""The seam between the runtime and the engines: what an engine is given, what it yields, what it promises."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Union, runtime_checkable

from ..errors import ResidentError
from ..events import Finish, LoadProgress
from ..request import ModelSpec, Prompt, Sampling
from ..telemetry import Bytes

TokenIds = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StopEntry:
    """One control token that ends an answer, with its text and where it was found."""

    id: int
    text: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """How this prompt's answer marks thinking.

    open_tag, close_tag: as text
    is_open:             the template has opened the block already: the answer begins inside it
    close_ids:           what to feed to close the block by force; empty where that is not possible
    """

    open_tag: str
    close_tag: str
    is_open: bool = False
    close_ids: TokenIds = ()


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A prompt ready for an engine.

    token_ids: None where only the server encodes (a chat endpoint)
    text:      the exact rendered prompt, control tokens visible
    stop:      control tokens that end the answer, with their source
    notes:     what the user should know (dropped turns, a folded system message)
    is_endless: only max_tokens ends the answer, so that a benchmark counts equal tokens; `stop` is empty then
    """

    prompt: Prompt
    token_ids: TokenIds | None
    text: str
    stop: tuple[StopEntry, ...] = ()
    reasoning: Reasoning | None = None
    notes: tuple[str, ...] = ()
    is_endless: bool = False

    @property
    def num_tokens(self) -> int | None:
        return None if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request as an engine sees it.

    max_tokens:   output tokens, resolved against the context; None leaves it to a server
    stop_strings: only to save steps: they are matched above the engines, on text
    """

    encoded: Encoded
    sampling: Sampling
    max_tokens: int | None
    seed: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """`num_done` of `num_total` prompt tokens have their KV, `num_cached` of them from before."""

    num_done: int
    num_total: int
    num_cached: int = 0


@dataclass(frozen=True, kw_only=True)
class WaitStep:
    """Nothing new yet. An engine that waits for others (a server) yields one every WAIT_STEP_S at least.

    what: what is waited for, to follow "waiting for"
    """

    what: str
    waited_s: float


WAIT_STEP_S = 0.2
"""Longest silence of a waiting engine, so that an interrupt is seen in time."""


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """New output: whole characters only, all ids, and on the last step the finish.

    text:      may be empty while a character is incomplete; the text of a stop token is left out
    token_ids: stop tokens included; empty where a server does not tell
    num_tokens: output tokens in this step, where ids are not told
    thinking:  text that a server has already told to be thinking
    details:   on the last step: what the report should hold beside (drafted, accepted, server timings ...);
               "num_prompt_tokens" and "num_cached_tokens" override the runtime's own counts
    """

    text: str
    token_ids: TokenIds = ()
    num_tokens: int | None = None
    thinking: str = ""
    finish: Finish | None = None
    details: dict[str, object] = field(default_factory=dict)

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) if self.num_tokens is None else self.num_tokens


@dataclass(frozen=True, kw_only=True)
class FailedStep:
    """This request failed and is over; the others go on."""

    error: ResidentError


Step = Union[PrefillStep, WaitStep, DecodeStep, FailedStep]


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Sent to an engine after a decode step: take these ids next, as if they had been drawn.

    They come back in the request's next steps, as ids and text, and count as output tokens.
    """

    token_ids: TokenIds


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Sent to an engine after a decode step: this request is over; it yields no further step."""


Command = Union[Feed, Drop, None]
Steps = Generator[tuple[int, Step], Command, None]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do with the model that it holds; contract tests skip what it cannot, by name."""

    has_token_ids: bool = True
    can_feed: bool = True
    can_batch: bool = False
    has_logits: bool = False
    has_prefix_reuse: bool = False
    is_remote: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What really runs: for the report, the monitor and `doctor`.

    made_for:  most positions that the model was made for, by its files; None if not known
    attention: the kernel that runs, not the one asked for
    patches:   ids of applied patches
    """

    engine: str
    model: str
    context_len: int | None
    device: str
    dtype: str
    attention: str
    kv_cache: str
    made_for: int | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    patches: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    details: dict[str, object] = field(default_factory=dict)


class Engine(Protocol):
    """A loaded model. One thread uses it at a time."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def bytes(self) -> Bytes:
        """What it holds now, measured where that can be measured. O(1)."""
        ...

    def encode(self, prompt: Prompt) -> Encoded:
        """The prompt as token ids, with its stop conditions; raises TemplateFailed."""
        ...

    def generate(self, batch: Sequence[Work]) -> Steps:
        """Yield (index, step); each index ends with one step that has a finish, or fails.

        A command that is sent instead of `next` applies to the request of the step just yielded.
        Closing the generator cancels what is left: its KV pages are free when `close` returns, and
        the next request gives the text that it would have given without the cancelled one.
        """
        ...

    def trim(self, num_bytes: int) -> int:
        """Give back idle KV memory; return the bytes really freed."""
        ...

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        ...


@runtime_checkable
class Parkable(Protocol):
    """What an engine offers beside, if its weights can wait off the device and come back without the disk.

    A torch engine keeps them in host memory; a client of a server may put the server to sleep. While parked,
    `bytes.device` is 0 and `bytes.host_copy` is what waits; a copy may stay after the return. `close` drops that too.
    """

    @property
    def is_in_place(self) -> bool:
        """Whether all weights are where the engine put them; False if someone else moved them."""
        ...

    def park(self, max_bytes: int) -> bool:
        """Leave the device, keeping at most `max_bytes` of host memory. False: it cannot, and nothing changed."""
        ...

    def unpark(self) -> Generator[LoadProgress, None, None]:
        """Come back. Closing it, or an error in it, leaves the engine parked."""
        ...

    def forget(self) -> int:
        """Drop a copy that was kept while on the device; return its bytes. Parked, it keeps it and returns 0."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """What an engine offers beside, if the model lives in a process that can end without it."""

    @property
    def is_alive(self) -> bool:
        """False once the process has ended: `bytes` is 0 then, and the next lease loads the model anew."""
        ...


@runtime_checkable
class Observable(Protocol):
    """What an engine offers beside, if the servers behind it can be asked how they are."""

    def observe(self) -> list[dict[str, object]]:
        """A row of JSON values for each server, None for what it does not tell. Any thread may call it."""
        ...


Loading = Generator[LoadProgress, None, Engine]
"""Loading is a generator too: it yields progress, returns the engine, and closing it drops what is half loaded."""


class Loader(Protocol):
    """What every engine module offers as `load`."""

    def __call__(self, spec: ModelSpec) -> Loading: ...


class Settle(Protocol):
    """What an engine offers as `settle`: the spec with every "auto" as it comes out here, and what the engine does not
    look at as "auto". Attention may stay as it is: what runs is known once the model is loaded."""

    def __call__(self, spec: ModelSpec) -> ModelSpec: ...


class Footprint(Protocol):
    """What an engine module may offer as `footprint`: the bytes by part before loading, from headers and config."""

    def __call__(self, spec: ModelSpec) -> Bytes: ...
