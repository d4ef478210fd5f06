"""Which part of a prompt is already cached: prefixes that were computed before, and are kept while there is room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> common_length([1, 2, 3], [1, 2, 4])
    2
    """
    low, high = 0, min(len(a), len(b))
    a, b = tuple(a[:high]), tuple(b[:high])
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def usable_length(cached: Sequence[int], ids: Sequence[int], boundaries: Collection[int] | None) -> int:
    """How many of `ids` need not be computed again, given what is cached.

    One id at least is left, since its logits are wanted. A cache that cannot be cut anywhere can be used only at
    its `boundaries`.

    >>> usable_length([1, 2, 3], [1, 2, 3], None), usable_length([1, 2, 3], [1, 2, 4, 5], (1, 3))
    (2, 1)
    """
    length = min(common_length(cached, ids), len(ids) - 1)
    return length if boundaries is None else max((at for at in boundaries if at <= length), default=0)


@dataclass(frozen=True, kw_only=True)
class Kept(Generic[T]):
    """A prefix: its ids, what was computed for them, and where it can be cut (None: anywhere)."""

    ids: tuple[int, ...]
    boundaries: tuple[int, ...] | None
    value: T
    num_bytes: int


class KeptPrefixes(Generic[T]):
    """Prefixes within a budget of bytes; the least recently used goes first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: list[Kept[T]] = []

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, new: Kept[T]) -> None:
        """Keep a prefix, instead of those that it contains; one over the whole budget is not kept."""
        self._kept = [one for one in self._kept if not self._covers(new, one)]
        if new.num_bytes > self.max_bytes:
            return
        self._kept.append(new)
        while self.num_bytes > self.max_bytes:
            del self._kept[0]

    @staticmethod
    def _covers(new: Kept[T], old: Kept[T]) -> bool:
        is_prefix = common_length(new.ids, old.ids) == len(old.ids)
        return is_prefix and (new.boundaries is None or set(old.boundaries or ()) <= set(new.boundaries))

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether a kept prefix covers all of `ids`."""
        return any(common_length(one.ids, ids) == len(ids) for one in self._kept)

    def longest(self, ids: Sequence[int]) -> tuple[int, Kept[T] | None]:
        """(usable length, prefix) of the kept prefix that saves most for these ids."""
        found = [(usable_length(one.ids, ids, one.boundaries), at) for at, one in enumerate(self._kept)]
        length, at = max(found, default=(0, -1))
        return (length, self._kept[at]) if length else (0, None)

    def touch(self, used: Kept[T]) -> None:
        """Note that a prefix was used; one that has gone meanwhile stays away."""
        if any(one is used for one in self._kept):
            self._kept = [*(one for one in self._kept if one is not used), used]

    def clear(self) -> None:
        self._kept.clear()
