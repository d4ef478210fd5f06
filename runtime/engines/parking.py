"""Weights of a torch module that leave the device and come back at bus speed, tensors and views unchanged.

The storages are emptied and filled again in place, so tied weights, views and references to parameters stay
what they are; only addresses change, so captured graphs must go first. The host copy is page-locked where the
device is CUDA. It stays after the weights have come back: they are never written, so that the next eviction has
nothing to copy.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator

import torch

from ..errors import OutOfMemory
from ..events import LoadProgress
from ..telemetry import format_bytes

log = logging.getLogger(__name__)

ALIGNMENT = 512
"""Bytes between the starts of two storages in the host copy, as torch's own allocator aligns them."""

PROGRESS_BYTES = 1 << 28


class Parking:
    """Where the weights of one module wait while they are off its device."""

    def __init__(self, module: torch.nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        self._homes = [(tensor, storage) for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()]
        self._storages = list({storage._cdata: storage for _, storage in self._homes}.values())
        self._device = self._storages[0].device if self._storages else torch.device("cpu")
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copy: torch.Tensor | None = None
        self._is_pinned = False
        self.is_parked = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, each storage once."""
        return sum(self._sizes)

    @property
    def host_bytes(self) -> int:
        return 0 if self._copy is None else self._copy.nbytes

    @property
    def is_in_place(self) -> bool:
        """Whether every weight is where it was when this began, and whole."""
        return (
            not self.is_parked
            and all(tensor.untyped_storage()._cdata == storage._cdata for tensor, storage in self._homes)
            and all(storage.nbytes() == size for storage, size in zip(self._storages, self._sizes))
        )

    def park(self, max_bytes: int) -> bool:
        """Empty the weights, once the host holds them; False, and nothing changed, if they cannot or may not."""
        if not self._can_park():
            return False
        if self._copy is None:
            size = self._places()[-1].stop
            if size > max_bytes:
                return False
            copy = torch.empty(size, dtype=torch.uint8)
            self._is_pinned = self._device.type == "cuda" and _pin(copy)
            for storage, place in self._in_order():
                copy[place].copy_(_as_bytes(storage), non_blocking=self._is_pinned)
            self._wait()
            self._copy = copy
        self._empty()
        self.is_parked = True
        return True

    def unpark(self) -> Generator[LoadProgress, None, None]:
        """Fill the weights again; if that fails or is closed, they stay parked. Raises OutOfMemory."""
        if self._copy is None or not self.is_parked:
            return
        total, done, told = self.num_bytes, 0, 0
        try:
            for (storage, place), size in zip(self._in_order(), self._sizes):
                storage.resize_(size)
                _as_bytes(storage).copy_(self._copy[place], non_blocking=self._is_pinned)
                done += size
                if done - told >= PROGRESS_BYTES or done == total:
                    told = done
                    yield LoadProgress(done=done, total=total, what="weights from host memory")
            self._wait()
            self.is_parked = False
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{format_bytes(done)} of {format_bytes(total)} of weights came back to {self._device}, then it was "
                "full. Free memory there, or choose a smaller model."
            ) from error
        finally:
            if self.is_parked:
                self._wait()
                self._empty()

    def forget(self) -> int:
        """Drop the host copy; return its bytes. Parked weights are lost with it."""
        size, copy, self._copy = self.host_bytes, self._copy, None
        if copy is not None and self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(copy.data_ptr())  # type: ignore[no-untyped-call]
        self._is_pinned = False
        return size

    def _can_park(self) -> bool:
        """Only plain tensors whose memory torch itself manages can be emptied in place."""
        plain = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))
        return (
            bool(self._storages)
            and self.is_in_place
            and all(type(tensor) in plain for tensor, _ in self._homes)
            and all(storage.resizable() and storage.device == self._device for storage in self._storages)
        )

    def _places(self) -> list[slice]:
        places, start = [], 0
        for size in self._sizes:
            places.append(slice(start, start + size))
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return places

    def _in_order(self) -> Iterator[tuple[torch.UntypedStorage, slice]]:
        return zip(self._storages, self._places())

    def _empty(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pin(copy: torch.Tensor) -> bool:
    """Page-lock the copy, in its exact size (torch's own pinned tensors take the next power of two and keep it)."""
    error = torch.cuda.cudart().cudaHostRegister(copy.data_ptr(), copy.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error):
        log.warning("%s of host memory could not be page-locked; copies will be slower", format_bytes(copy.nbytes))
    return not int(error)
