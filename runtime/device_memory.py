"""Memory of a device as the device counts it, beside torch's own counters; and of the host."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device. The first two count every process and every allocator; the others only torch's, here.

    torch_reserved: what torch's allocator holds, tensors or not
    """

    device: str
    total: int
    free: int
    torch_allocated: int = 0
    torch_reserved: int = 0

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def torch_idle(self) -> int:
        """Held by torch's allocator without a tensor in it: ours to reuse, though not free for others."""
        return self.torch_reserved - self.torch_allocated


def resolve(device: str) -> str:
    """The device that a spec's `device` means, with its index: "auto" is the first CUDA device, else "cpu"."""
    torch = _torch()
    if device in ("auto", "cuda"):
        has_cuda = torch is not None and torch.cuda.is_available()
        return f"cuda:{torch.cuda.current_device()}" if has_cuda else "cpu"
    return device


def read(device: str) -> DeviceMemory | None:
    """The counters of "cpu" or "cuda:0" now; None where they are not known. Never imports torch."""
    device = resolve(device)
    if device == "cpu":
        return _host_memory()
    torch = _torch()
    if not device.startswith("cuda") or torch is None or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        device=device,
        total=total,
        free=free,
        torch_allocated=torch.cuda.memory_allocated(device),
        torch_reserved=torch.cuda.memory_reserved(device),
    )


def release_heap() -> None:
    """Give freed host memory back to the system, where C's allocator would keep it: glibc holds on to what
    tensors of less than 32 MB lay in, which is hundreds of MB of an unloaded model."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _torch() -> Any:
    """Torch if the process has loaded it already."""
    return sys.modules.get("torch")


def _host_memory() -> DeviceMemory | None:
    """The host's memory; `free` is what programs can get without swapping, the page cache included."""
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        return _meminfo()
    memory = psutil.virtual_memory()
    return DeviceMemory(device="cpu", total=memory.total, free=memory.available)


def _meminfo(path: str = "/proc/meminfo") -> DeviceMemory | None:
    if not os.path.exists(path):
        return None
    with open(path, encoding="ascii") as lines:
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return DeviceMemory(device="cpu", total=sizes["MemTotal"], free=sizes["MemAvailable"])
