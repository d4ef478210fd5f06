"""The transformers engine's KV cache: buffers of fixed size and address, and the token ids that lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..kv_cache import common_length

SNAPSHOT_EVERY = 2048
"""Tokens between kept states of a recurrent model while a prompt is computed."""


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


class LiveCache:
    """The buffers, and the ids whose keys and values lie in them.

    A recurrent layer's state cannot be cut back, so such a model keeps copies of it (snapshots) at some lengths,
    and only those lengths can be returned to.
    """

    def __init__(self, config: Any, capacity: int, dtype: torch.dtype) -> None:
        self.cache = fixed_cache(config, capacity, dtype)
        self.ids: list[int] = []
        self.marks: frozenset[int] = frozenset()
        self._fixed = [layer for layer in self.cache.layers if isinstance(layer, FixedLayer)]
        self._recurrent = [layer for layer in self.cache.layers if hasattr(layer, "recurrent_states")]
        self._snapshots: dict[int, State] = {}
        self._is_torn = False

    @property
    def is_recurrent(self) -> bool:
        return bool(self._recurrent)

    @property
    def num_bytes(self) -> int:
        """Bytes of buffers and states on the device, snapshots excluded."""
        buffers = [buffer for layer in self._fixed if layer.is_initialized for buffer in (layer.keys, layer.values)]
        states = [one for layer in self._recurrent for one in _states_of(layer)]
        return sum(one.numel() * one.element_size() for one in (*buffers, *states))

    @property
    def snapshot_bytes(self) -> int:
        return sum(
            one.numel() * one.element_size() for kept in self._snapshots.values() for part in kept for one in part
        )

    def rewind(self, ids: Sequence[int]) -> int:
        """Go back to the longest usable prefix that the buffers share with `ids`; return its length.

        At least one of `ids` is left to compute, since the last one's logits are needed.
        """
        shared = length = min(common_length(self.ids, ids), len(ids) - 1)
        self.marks = frozenset((shared, len(ids) - 1, *range(SNAPSHOT_EVERY, len(ids), SNAPSHOT_EVERY)))
        if not self._recurrent:
            self.marks = frozenset()
        elif length < len(self.ids) or self._is_torn:
            length = max((at for at in self._snapshots if at <= length), default=0)
            self._restore(length)
        self._cut(length)
        return length

    def _cut(self, length: int) -> None:
        for layer in self._fixed:
            layer.length = length
        del self.ids[length:]
        self._snapshots = {at: state for at, state in self._snapshots.items() if at <= length}
        self._is_torn = False

    def _restore(self, length: int) -> None:
        if length == 0:
            for layer in self._recurrent:
                layer.reset()
            return
        for layer, kept in zip(self._recurrent, self._snapshots[length], strict=True):
            for state, saved in zip(_states_of(layer), kept, strict=True):
                state.copy_(saved)

    def snapshot(self) -> None:
        """Keep the recurrent state of this length, so that a later prompt can start here."""
        if self._recurrent:
            self._snapshots[len(self.ids)] = [
                [state.to("cpu", copy=True) for state in _states_of(layer)] for layer in self._recurrent
            ]

    def repair(self) -> None:
        """After a forward pass that failed half way: what is beyond `ids` is forgotten."""
        self._is_torn = True
        for layer in self._fixed:
            layer.length = len(self.ids)


def _states_of(layer: Any) -> list[torch.Tensor]:
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [state for state in states if state is not None]
