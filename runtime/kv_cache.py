"""Which part of a prompt is already cached."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> common_length([1, 2, 3], [1, 2, 4])
    2
    """
    a, b = tuple(a), tuple(b)
    shorter = min(len(a), len(b))
    low, high = 0, shorter
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
