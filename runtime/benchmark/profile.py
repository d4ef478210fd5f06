"""Where the time of a decode step goes: the dearest kernels, by torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engines.base import Engine, Work
from ..request import GREEDY, Prompt
from .sample import Unstoppable


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel or operator: its name, its launches, and its own seconds in all of them."""

    name: str
    count: int
    total_s: float


def profile_decode(engine: Engine, *, num_tokens: int, most: int | None = None) -> list[Kernel]:
    """Kernels of a greedy answer of `num_tokens`, the dearest first; on a CPU, operators."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = engine.info.device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    work = Work(
        encoded=Unstoppable(engine).encode(Prompt.of("Count to one hundred.")),
        sampling=GREEDY,
        max_tokens=num_tokens,
        seed=0,
    )
    with profile(activities=activities) as profiler:
        for _ in engine.generate([work]):
            pass
    kernels = [_kernel(one, is_cuda=is_cuda) for one in profiler.key_averages()]
    kernels.sort(key=lambda one: one.total_s, reverse=True)
    return [one for one in kernels if one.total_s > 0][:most]


def _kernel(average: Any, *, is_cuda: bool) -> Kernel:
    micros = average.self_device_time_total if is_cuda else average.self_cpu_time_total
    return Kernel(name=str(average.key), count=int(average.count), total_s=micros / 1e6)
