"""When a model that is not to be kept leaves: after its last consumer in the prompt, known from the prompt itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..runtime import ModelSpec

Prompt = Mapping[str, Mapping[str, Any]]

LOADERS = frozenset({"ResidentLoadLLM", "ResidentLoadExLlamaV2", "ResidentConnectServer"})
"""Nodes with a `when_idle`: each stands for one model, told by its inputs."""

PASSING_ON = frozenset({"ResidentFree"})
SOCKETS = ("llm", "llm_2", "llm_3", "llm_4")
NOT_IDENTITY = frozenset({"when_idle", "host_copy_gb"})


def sources(prompt: Prompt, node: str) -> frozenset[str]:
    """The loaders whose model reaches one of a node's `llm` inputs, through whatever passes it on.

    Loaders with equal inputs load one model and count as one, so each is named by its inputs.
    """
    found: set[str] = set()
    seen: set[str] = set()
    wired = prompt[node].get("inputs", {})
    todo = [link for socket in SOCKETS if (link := _link(wired.get(socket))) is not None]
    while todo:
        one = todo.pop()
        if one in seen or one not in prompt:
            continue
        seen.add(one)
        inputs = prompt[one].get("inputs", {})
        if prompt[one].get("class_type") in LOADERS:
            identity = {name: value for name, value in inputs.items() if name not in NOT_IDENTITY}
            found.add(repr((prompt[one]["class_type"], sorted(identity.items()))))
        else:
            todo += [link for value in inputs.values() if (link := _link(value)) is not None]
    return frozenset(found)


def _link(value: object) -> str | None:
    """The node that an input is wired to; None for a constant."""
    is_link = isinstance(value, list) and len(value) == 2 and isinstance(value[1], int)
    return str(value[0]) if is_link and isinstance(value, list) else None


def consumers(prompt: Prompt, node: str) -> frozenset[str]:
    """All nodes of the prompt that generate with one of the models that `node` generates with, itself included."""
    mine = sources(prompt, node)
    others = (
        other
        for other, fields in prompt.items()
        if fields.get("inputs", {}).keys() & set(SOCKETS) and fields.get("class_type") not in PASSING_ON
    )
    return frozenset({node, *(other for other in others if sources(prompt, other) & mine)})


class LastUse:
    """Evicts models of which `when_idle` says so, once all their consumers in the prompt have run.

    A consumer whose output was cached never runs; then the model leaves at the start of the next prompt.
    """

    def __init__(self, evict: Callable[[ModelSpec], object]) -> None:
        self._evict = evict
        self._prompt_id: str | None = None
        self._done: set[str] = set()
        self._waiting: dict[ModelSpec, None] = {}
        self._kept: set[ModelSpec] = set()
        self._lock = threading.RLock()

    def keep(self, spec: ModelSpec, is_kept: bool) -> None:
        """Have a model stay after its last use for now, whatever its `when_idle` says; or no longer so."""
        with self._lock:
            (self._kept.add if is_kept else self._kept.discard)(spec)
            if is_kept:
                self._waiting.pop(spec, None)

    def is_kept(self, spec: ModelSpec) -> bool:
        return spec in self._kept

    def begin(self, prompt_id: str) -> None:
        """A prompt may have begun: what the one before left waiting goes."""
        with self._lock:
            if prompt_id == self._prompt_id:
                return
            left, self._waiting = list(self._waiting), {}
            self._prompt_id, self._done = prompt_id, set()
        for spec in left:
            self._evict(spec)

    def used(self, prompt_id: str, prompt: Prompt | None, node: str, specs: Iterable[ModelSpec]) -> None:
        """A node has run, well or not, with these models."""
        self.begin(prompt_id)
        with self._lock:
            leaving = [spec for spec in dict.fromkeys(specs) if spec.when_idle != "keep" and spec not in self._kept]
            self._done.add(node)
            is_last = prompt is None or node not in prompt or consumers(prompt, node) <= self._done
            for spec in leaving:
                self._waiting[spec] = None
            if is_last:
                for spec in leaving:
                    self._waiting.pop(spec, None)
        if is_last:
            for spec in leaving:
                self._evict(spec)
