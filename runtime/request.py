"""Frozen values that travel: messages, prompts, sampling, requests and model specs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, Union, get_args

from .errors import InvalidValue

Role = Literal["system", "user", "assistant"]
Thinking = Literal["auto", "on", "off"]
OnCutThinking = Literal["error", "empty", "thinking"]
WhenIdle = Literal["keep", "release", "sleep"]
Option = Union[str, int, float, bool, None]

MAX_SEED = 2**64 - 1

KV_CACHES = ("auto", "fp32", "bf16", "fp16", "q8", "q6", "q4")
"""Precisions of a KV cache; no engine has all of them."""

DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise InvalidValue(sentence)


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """Plain text of a message; never read as structure."""

    text: str


Part = TextPart
"""What a message is made of. Images join this union when an engine can see."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: Role
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        _require(
            self.role in get_args(Role),
            f"A message has the role {self.role!r}; roles are {', '.join(get_args(Role))}.",
        )

    @classmethod
    def of(cls, role: Role, text: str) -> Message:
        """A message of one text part."""
        return cls(role=role, parts=(TextPart(text=text),))

    @property
    def text(self) -> str:
        """The text parts joined, as the chat template sees them."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the user wants said to the model, before any chat template.

    template:         None for the model's own, the name of a built-in rule, or the text of a Jinja template
    template_options: further keywords for the template, as pairs
    fold_system:      put a system message that the template refuses into the first user message
    drop_history:     drop the oldest turns, pair by pair, until the prompt fits
    thinking_tags:    the user's own (open, close) tags; None finds them from the model
    clean:            names of the cleaning rules applied to the answer; the raw text stays in the report
    """

    messages: tuple[Message, ...]
    thinking: Thinking = "auto"
    answer_prefix: str = ""
    stop_strings: tuple[str, ...] = ()
    template: str | None = None
    template_options: tuple[tuple[str, Option], ...] = ()
    fold_system: bool = False
    drop_history: bool = False
    thinking_tags: tuple[str, str] | None = None
    clean: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(bool(self.messages), "The prompt is empty. Write something into `user`, or wire a text in.")
        _require(
            any(m.text.strip() for m in self.messages if m.role != "system") or bool(self.answer_prefix.strip()),
            "The prompt holds no user text. Write something into `user`, or wire a text in.",
        )
        _require(
            self.thinking in get_args(Thinking),
            f"thinking is {self.thinking!r}; it is one of {', '.join(get_args(Thinking))}.",
        )
        _require(all(self.stop_strings), "A stop string is empty; remove it.")
        if self.thinking_tags is not None:
            _require(all(self.thinking_tags), "A thinking tag is empty; give both the opening and the closing tag.")

    @classmethod
    def of(cls, user: str, *, system: str = "") -> Prompt:
        """A prompt of one user message, with a system message if one is given."""
        messages = (Message.of("system", system),) if system else ()
        return cls(messages=(*messages, Message.of("user", user)))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. The defaults are neutral: the model's own distribution.

    temperature:        0 is greedy
    top_k:              0 is off
    top_p, min_p:       1 and 0 are off
    repetition_penalty: 1 is off; applied to tokens of prompt and output (Keskar et al. 2019, CTRL)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 100, f"temperature is {self.temperature}; it runs from 0 (greedy) to 100.")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}; it runs from just above 0 to 1 (off).")
        _require(self.top_k >= 0, f"top_k is {self.top_k}; it starts at 0 (off).")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}; it runs from 0 (off) to 1.")
        _require(
            0 < self.repetition_penalty <= 10,
            f"repetition_penalty is {self.repetition_penalty}; it runs from just above 0 to 10, and 1 is off.",
        )


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    max_tokens:      output tokens; None is all that fits the context
    thinking_budget: tokens after which an open thinking block is closed by force; None is no limit
    on_cut_thinking: what a token limit inside the thinking block gives
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    seed: int = 0
    thinking_budget: int | None = None
    on_cut_thinking: OnCutThinking = "error"

    def __post_init__(self) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens}; it starts at 1, or leave it out for all that fits.",
        )
        _require(0 <= self.seed <= MAX_SEED, f"seed is {self.seed}; it runs from 0 to {MAX_SEED}.")
        _require(
            self.thinking_budget is None or self.thinking_budget >= 0,
            f"thinking_budget is {self.thinking_budget}; it starts at 0.",
        )
        _require(
            self.on_cut_thinking in get_args(OnCutThinking),
            f"on_cut_thinking is {self.on_cut_thinking!r}; it is one of {', '.join(get_args(OnCutThinking))}.",
        )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Which model, which engine, which load options: a recipe that a graph may keep for hours.

    model:       a folder or file on this machine, or a name that the engine understands (a server's model)
    engine:      a name of the engine table, or "auto"
    device:      "auto", "cpu", "mps", or a GPU: "cuda:0" (also ROCm's), "xpu:0"
    revision:    a mark of the state of the model's files: a replaced file is another model
    context_len: most tokens, prompt and output together; None is what the model was made for
    kv_cache:    precision of the KV cache, one of KV_CACHES
    options:     what only one engine knows, as sorted pairs
    when_idle:   what becomes of the model after a run; not part of its identity
    host_copy_bytes: host memory that its weights may keep when they must leave the device; None is a quarter of
                 the free memory, 0 is off; not part of its identity
    """

    model: str
    revision: str = ""
    engine: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    context_len: int | None = None
    kv_cache: str = "auto"
    options: tuple[tuple[str, Option], ...] = ()
    when_idle: WhenIdle = field(default="keep", compare=False)
    host_copy_bytes: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _require(bool(self.model), "No model is chosen. Pick one in the loader, or put one into the LLM folder.")
        _require(
            self.context_len is None or self.context_len >= 16,
            f"context_len is {self.context_len}; it starts at 16, or leave it out for the model's own.",
        )
        _require(
            DEVICE.fullmatch(self.device) is not None,
            f"device is {self.device!r}; it is auto, cpu, or a GPU such as cuda:0.",
        )
        _require(self.kv_cache in KV_CACHES, f"kv_cache is {self.kv_cache!r}; it is one of {', '.join(KV_CACHES)}.")
        _require(
            self.host_copy_bytes is None or self.host_copy_bytes >= 0,
            f"host_copy_bytes is {self.host_copy_bytes}; it starts at 0 (off), or leave it out for a quarter.",
        )
        object.__setattr__(self, "options", tuple(sorted(self.options)))

    def option(self, name: str, default: Option = None) -> Option:
        """The value of an engine's own option."""
        return dict(self.options).get(name, default)

    def whole_number(self, name: str, default: int, *, least: int = 0) -> int:
        """The value of an option that counts something; raises InvalidValue for another kind, or one below `least`."""
        value = self.option(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0 or value < least:
            raise InvalidValue(f"The option {name} is {value!r}; it is a whole number from {least} on.")
        return int(value)

    def differences(self, other: ModelSpec) -> list[str]:
        """What changed from `other` to this spec, as "name: old -> new", for the log."""
        names = ("model", "revision", "engine", "device", "dtype", "attention", "context_len", "kv_cache", "options")
        pairs = ((name, getattr(other, name), getattr(self, name)) for name in names)
        return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]
