"""Where the bytes come from: the host's memory ledger, or plain free memory."""

from __future__ import annotations

import sys
from typing import Protocol

from .device_memory import read, release_heap, resolve
from .request import ModelSpec


class Room(Protocol):
    """Makes room on the device for a model, and takes room back."""

    def reserve(self, spec: ModelSpec, num_bytes: int) -> None:
        """Make room for a model that is about to be loaded or used, `num_bytes` in full; called before every lease."""
        ...

    def settle(self, spec: ModelSpec) -> None:
        """The model is idle from now on: others may take its room."""
        ...

    def release_cached(self) -> None:
        """Give freed memory back to the device."""
        ...

    def can_free(self, spec: ModelSpec) -> tuple[str, int] | None:
        """The device where a spec would run, and the bytes that could be made free there; None if not known."""
        ...


class PlainRoom:
    """No host: whatever is free is ours."""

    def reserve(self, spec: ModelSpec, num_bytes: int) -> None:
        pass

    def settle(self, spec: ModelSpec) -> None:
        pass

    def release_cached(self) -> None:
        release_heap()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def can_free(self, spec: ModelSpec) -> tuple[str, int] | None:
        device = resolve(spec.device)
        memory = read(device)
        return (device, memory.free + memory.torch_idle) if memory else None
