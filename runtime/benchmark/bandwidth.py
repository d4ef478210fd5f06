"""The measured memory bandwidth of a device: the ceiling's one ingredient that no datasheet gives honestly."""

from __future__ import annotations

import statistics
import time

COPY_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
REPEATS = 7


def measure_bandwidth(device: str) -> float:
    """Bytes per second that the device really moves: the better of a copy (read + write) and a sum (read).

    Buffers are far larger than any cache. Takes about a second on a CPU; imports torch.
    """
    import torch

    kind = torch.device(device).type
    num_bytes = COPY_BYTES.get(kind, COPY_BYTES["cpu"])
    with torch.inference_mode():
        source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)

        def seconds(act: object) -> float:
            assert callable(act)
            times = []
            for _ in range(REPEATS):
                _synchronize(device)
                began = time.perf_counter()
                act()
                _synchronize(device)
                times.append(time.perf_counter() - began)
            return statistics.median(times[1:])

        copied = 2 * num_bytes / seconds(lambda: target.copy_(source))
        read = num_bytes / seconds(source.sum)
    return max(copied, read)


def _synchronize(device: str) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
