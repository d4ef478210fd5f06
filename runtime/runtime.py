"""The Runtime owns loaded models: it lends them out, counts their loads, and lets them go."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from . import engines
from .engines.base import Engine, EngineInfo, Loading
from .errors import RuntimeClosed
from .events import Event, LoadProgress
from .request import ModelSpec, Request
from .stream import stream
from .telemetry import Bytes, format_bytes

log = logging.getLogger(__name__)

UNLOAD_WAIT_S = 5.0
"""How long an unload waits for a model that another thread is using."""


class Room(Protocol):
    """Where the bytes come from: the host's memory ledger, or plain torch."""

    def reserve(self, spec: ModelSpec, num_bytes: int) -> None:
        """Make room for a model that is about to be loaded or used; called before every lease."""
        ...

    def release_cached(self) -> None:
        """Give freed memory back to the device."""
        ...


class PlainRoom:
    """No host: whatever is free is ours."""

    def reserve(self, spec: ModelSpec, num_bytes: int) -> None:
        pass

    def release_cached(self) -> None:
        pass


@dataclass(eq=False)
class _Slot:
    """A spec, its engine while loaded, and the lock that one user at a time holds."""

    spec: ModelSpec
    engine: Engine | None = None
    num_loads: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    used_by: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A loaded model as the monitor sees it."""

    spec: ModelSpec
    info: EngineInfo
    bytes: Bytes
    num_loads: int
    is_busy: bool


class Lease:
    """The right to use a loaded model for a block; leaving the block gives it back."""

    def __init__(self, engine: Engine, release: Callable[[], None]) -> None:
        self._engine = engine
        self._release = release

    def __enter__(self) -> Engine:
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._release()


class Runtime:
    """Owns engines by spec. Equal specs share one engine, which stays loaded between uses.

    load: how a spec becomes an engine; a test passes its own
    room: who makes room on the device
    """

    def __init__(self, *, load: Callable[[ModelSpec], Loading] = engines.load, room: Room | None = None) -> None:
        self._load = load
        self.room: Room = room or PlainRoom()
        self._slots: dict[ModelSpec, _Slot] = {}
        self._lock = threading.RLock()
        self._is_closed = False

    def generate(
        self, spec: ModelSpec, requests: Sequence[Request]
    ) -> Generator[Event, None, tuple[EngineInfo, Bytes]]:
        """Answer a batch with one model, loading it if needed; see events.py for the order. Closing cancels.

        Returns what ran, and the bytes that it held at the end.
        """
        lease = yield from self.leasing(spec)
        with lease as engine:
            yield from stream(engine, requests)
            return engine.info, engine.bytes

    def leasing(self, spec: ModelSpec) -> Generator[LoadProgress, None, Lease]:
        """Yield load progress, return the lease. Closing it before that drops what was half loaded."""
        slot = self._slot(spec)
        if slot.used_by == threading.get_ident():
            raise RuntimeError(f"{spec.model} is leased twice by one thread.")
        slot.lock.acquire()
        slot.used_by = threading.get_ident()
        try:
            self.room.reserve(spec, slot.engine.bytes.device if slot.engine else 0)
            if slot.engine is None:
                slot.engine = yield from self._load(spec)
                slot.num_loads += 1
                log.info("loaded %s: %s", spec.model, format_bytes(slot.engine.bytes.device))
        except BaseException:
            self._release(slot)
            self.room.release_cached()
            raise
        return Lease(slot.engine, lambda: self._release(slot))

    @contextlib.contextmanager
    def lease(self, spec: ModelSpec) -> Iterator[Engine]:
        """The loaded engine for a block, without progress."""
        loading = self.leasing(spec)
        while True:
            try:
                next(loading)
            except StopIteration as end:
                with end.value as engine:
                    yield engine
                return

    def _slot(self, spec: ModelSpec) -> _Slot:
        with self._lock:
            if self._is_closed:
                raise RuntimeClosed("The runtime is closed. Restart ComfyUI to use it again.")
            return self._slots.setdefault(spec, _Slot(spec))

    @staticmethod
    def _release(slot: _Slot) -> None:
        slot.used_by = None
        slot.lock.release()

    def residents(self) -> list[Resident]:
        """The loaded models, in the order of their first lease."""
        with self._lock:
            loaded = [(slot, slot.engine) for slot in self._slots.values() if slot.engine]
        return [
            Resident(
                spec=slot.spec,
                info=engine.info,
                bytes=engine.bytes,
                num_loads=slot.num_loads,
                is_busy=slot.lock.locked(),
            )
            for slot, engine in loaded
        ]

    def num_loads(self, spec: ModelSpec) -> int:
        """How often the spec was loaded since this runtime began."""
        with self._lock:
            return self._slots[spec].num_loads if spec in self._slots else 0

    def trim(self, spec: ModelSpec, num_bytes: int) -> int:
        """Give back idle KV memory of one model; return the bytes freed, 0 while it is used."""
        return self._with_idle(spec, lambda engine: engine.trim(num_bytes))

    def unload(self, spec: ModelSpec | None = None) -> int:
        """Unload one model, or all; return the device bytes freed. A model that stays in use is left alone."""
        with self._lock:
            specs = [spec] if spec else list(self._slots)
        return sum(self._with_idle(one, self._close_engine(one)) for one in specs)

    def _close_engine(self, spec: ModelSpec) -> Callable[[Engine], int]:
        def close(engine: Engine) -> int:
            freed = engine.bytes.device
            self._slots[spec].engine = None
            engine.close()
            self.room.release_cached()
            log.info("unloaded %s: %s freed", spec.model, format_bytes(freed))
            return freed

        return close

    def _with_idle(self, spec: ModelSpec, act: Callable[[Engine], int]) -> int:
        with self._lock:
            slot = self._slots.get(spec)
        if slot is None or slot.engine is None or slot.used_by == threading.get_ident():
            return 0
        if not slot.lock.acquire(timeout=UNLOAD_WAIT_S):
            log.warning("%s is in use; it stays", spec.model)
            return 0
        try:
            return act(slot.engine) if slot.engine else 0
        finally:
            slot.lock.release()

    def close(self) -> None:
        """Unload everything and lend nothing more. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
        self.unload()


_process_runtime: Runtime | None = None
_process_lock = threading.Lock()


def get() -> Runtime:
    """The process's one Runtime, made on first use. Only `nodes/` and `__main__` call it."""
    global _process_runtime
    with _process_lock:
        if _process_runtime is None:
            _process_runtime = Runtime()
            import atexit

            atexit.register(_process_runtime.close)
        return _process_runtime
