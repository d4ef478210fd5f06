"""The transformers engine's KV cache: buffers of fixed size and address, and the token ids that lie in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..kv_cache import Kept, KeptPrefixes, usable_length

SNAPSHOT_EVERY = 2048
"""Tokens between kept states of a recurrent model while a prompt is computed."""
MIN_KEPT = 64
"""A prefix is copied aside only if at least so many tokens would be lost."""


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values in buffers [1, heads, capacity, head_dim] that are made once.

    Attention gets a view of the used part, so that it computes exactly what it would on a cache that grows.
    """

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.capacity = capacity
        self.dtype = dtype
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Make the buffers. They are plain tensors, so that any thread may write them, in inference mode or not."""
        self.device = key_states.device
        with torch.inference_mode(False):
            self.keys, self.values = (
                torch.empty((*states.shape[:-2], self.capacity, states.shape[-1]), dtype=self.dtype, device=self.device)
                for states in (key_states, key_states if value_states is None else value_states)
            )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        kind = key_states.dtype
        return self.keys[..., :end, :].to(kind), self.values[..., :end, :].to(kind)

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """(keys that attention sees, 0); `query` is a count in transformers 5, the positions in 4."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:
        return self.capacity

    def reset(self) -> None:
        self.length = 0


def fixed_cache(config: Any, capacity: int, dtype: torch.dtype) -> Cache:
    """A cache for one sequence of at most `capacity` tokens; recurrent layers keep transformers' own fixed state.

    Layers with a sliding window get full-length buffers too: their mask hides what lies outside the window, and
    any prefix of them can be reused.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        FixedLayer(capacity, dtype) if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    return cache


State = list[list[torch.Tensor]]
"""A copy of the recurrent layers' states, layer by layer."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A prefix in host memory: (keys, values) by layer, and recurrent states by length."""

    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    states: dict[int, State]


class LiveCache:
    """The buffers, the ids whose keys and values lie in them, and prefixes kept aside in host memory.

    A recurrent layer's state cannot be cut back, so a model with such layers keeps copies of it (snapshots) at
    some lengths, and only those can be returned to. All methods that touch tensors run in inference mode.

    marks: lengths at which the prompt that is being computed should be snapshot
    """

    def __init__(self, config: Any, capacity: int, dtype: torch.dtype, kept_bytes: int) -> None:
        self._recipe = (config, capacity, dtype)
        self._kept: KeptPrefixes[Saved] = KeptPrefixes(kept_bytes)
        self._renew()

    def _renew(self) -> None:
        """Start with empty hands: new buffers, made at the next forward pass."""
        self.cache = fixed_cache(*self._recipe)
        self.ids: list[int] = []
        self.marks: frozenset[int] = frozenset()
        self._snapshots: dict[int, State] = {}
        self._fixed = [layer for layer in self.cache.layers if isinstance(layer, FixedLayer)]
        self._recurrent = [layer for layer in self.cache.layers if type(layer).__name__ == "LinearAttentionLayer"]
        num_dummies = sum(type(layer).__name__ == "DummyLayer" for layer in self.cache.layers)
        self._can_cut = len(self._fixed) + len(self._recurrent) + num_dummies == len(self.cache.layers)
        self._is_torn = False
        self._num_prompt = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers and states on the device."""
        buffers = (buffer for layer in self._fixed if layer.is_initialized for buffer in (layer.keys, layer.values))
        return _size(buffers) + _size(one for layer in self._recurrent for one in _states_of(layer))

    @property
    def host_bytes(self) -> int:
        """Bytes of kept prefixes and snapshots."""
        return self._kept.num_bytes + sum(_size_of_state(state) for state in self._snapshots.values())

    @property
    def _boundaries(self) -> tuple[int, ...] | None:
        """Lengths that the buffers can be cut to; None for any."""
        if not self._can_cut:
            return () if self._is_torn else (len(self.ids),)
        if not self._recurrent:
            return None
        return (*self._snapshots, *(() if self._is_torn else (len(self.ids),)))

    def rewind(self, ids: Sequence[int]) -> int:
        """Make the buffers hold the longest prefix of `ids` that is known; return its length."""
        length = usable_length(self.ids, ids, self._boundaries)
        kept_length, kept = self._kept.longest(ids)
        if self._num_prompt - length >= MIN_KEPT:
            self.keep()
        if kept is not None and kept_length > length:
            self._load(kept)
            length = kept_length
        shared = usable_length(self.ids, ids, None)
        self._cut(length)
        self._num_prompt = len(ids)
        if self._recurrent:
            self.marks = frozenset((shared, len(ids) - 1, *range(SNAPSHOT_EVERY, len(ids), SNAPSHOT_EVERY)))
        return length

    def _cut(self, length: int) -> None:
        if not self._can_cut and (length < len(self.ids) or self._is_torn):
            self._renew()
            return
        if self._recurrent and (length < len(self.ids) or self._is_torn):
            self._restore(length)
        for layer in self._fixed:
            layer.length = length
        del self.ids[length:]
        self._snapshots = {at: state for at, state in self._snapshots.items() if at <= length}
        self._is_torn = False

    def _restore(self, length: int) -> None:
        for at, layer in enumerate(self._recurrent):
            if length == 0:
                layer.reset()
                continue
            for state, saved in zip(_states_of(layer), self._snapshots[length][at]):
                state.copy_(saved)
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)

    def snapshot(self) -> None:
        """Keep the recurrent state of this length, so that a later prompt can start here."""
        if not self._recurrent or not self._kept.max_bytes:
            return
        state = [[one.to("cpu", copy=True) for one in _states_of(layer)] for layer in self._recurrent]
        self._snapshots[len(self.ids)] = state
        while len(self._snapshots) * _size_of_state(state) > self._kept.max_bytes:
            del self._snapshots[next(iter(self._snapshots))]

    def keep(self) -> None:
        """Copy the prompt that the buffers hold into host memory, if the budget allows it; the answer is not kept."""
        length = min(self._num_prompt, len(self.ids))
        states = {at: state for at, state in self._snapshots.items() if at <= length}
        if self._recurrent:
            length = max(states, default=0)
        if not length or not self._can_cut or self._kept.holds(self.ids[:length]):
            return
        views = [(layer.keys[..., :length, :], layer.values[..., :length, :]) for layer in self._fixed]
        num_bytes = _size(one for pair in views for one in pair) + sum(map(_size_of_state, states.values()))
        if num_bytes > self._kept.max_bytes:
            return
        saved = Saved(
            buffers=[(keys.to("cpu", copy=True), values.to("cpu", copy=True)) for keys, values in views],
            states=states,
        )
        boundaries = tuple(states) if self._recurrent else None
        self._kept.put(Kept(ids=tuple(self.ids[:length]), boundaries=boundaries, value=saved, num_bytes=num_bytes))

    def _load(self, kept: Kept[Saved]) -> None:
        """Fill the buffers, which exist by now, from a kept prefix."""
        length = len(kept.ids)
        self._is_torn = True
        self.ids, self._snapshots = [], {}  # a copy that fails half way leaves nothing that could be taken for whole
        for layer, (keys, values) in zip(self._fixed, kept.value.buffers):
            layer.keys[..., :length, :] = keys
            layer.values[..., :length, :] = values
        self.ids = list(kept.ids)
        self._snapshots = dict(kept.value.states)
        self._is_torn = bool(self._recurrent)
        self._kept.touch(kept)

    def repair(self) -> None:
        """After a forward pass that failed half way: what is beyond `ids` is forgotten."""
        self._is_torn = True
        for layer in self._fixed:
            layer.length = len(self.ids)

    @property
    def is_ready(self) -> bool:
        """Whether the buffers exist."""
        return all(layer.is_initialized for layer in self._fixed) and all(map(_states_of, self._recurrent))

    def start_over(self) -> None:
        """Empty the buffers, which stay where they are."""
        self._cut(0)

    def drop_buffers(self) -> None:
        """Free the device's memory; kept prefixes stay."""
        self._renew()

    def forget(self) -> None:
        """Free the kept prefixes."""
        self._kept.clear()


def _states_of(layer: Any) -> list[torch.Tensor]:
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _size_of_state(state: State) -> int:
    return _size(one for part in state for one in part)
