"""The measured memory bandwidth of a device: the ceiling's one ingredient that no datasheet gives honestly."""

from __future__ import annotations

import time
from collections.abc import Callable

NUM_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}
REPEATS = 4


def measure_bandwidth(device: str) -> float:
    """Bytes per second that the device really moves: the best of copies (read + write) and sums (read).

    Buffers are far larger than any cache. Other programs make a measurement too low, never too high, so the best of
    many counts, taken between the runs that it is compared with. Takes under a second; imports torch.
    """
    import torch

    kind = torch.device(device).type
    num_bytes = NUM_BYTES.get(kind, NUM_BYTES["cpu"])
    with torch.inference_mode():
        source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        copied = 2 * num_bytes / _best_s(lambda: target.copy_(source), device)
        read = num_bytes / _best_s(source.sum, device)
    return max(copied, read)


def _best_s(act: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of some runs; the first only warms up."""
    times = []
    for _ in range(1 + REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        act()
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _synchronize(device: str) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
