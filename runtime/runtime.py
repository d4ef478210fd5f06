"""The Runtime owns loaded models: it lends them out, counts their loads, and lets them go."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from . import engines
from .collect import report_of
from .device_memory import read as read_memory
from .engines.base import Engine, EngineInfo, Loading, Mortal, Observable, Parkable
from .errors import ResidentError, RuntimeClosed, release_frames
from .events import Event, Finished, LoadProgress
from .journal import Journal, MarkKind, Report
from .preflight import check_fits
from .request import ModelSpec, Request
from .room import PlainRoom, Room
from .slot import Resident, Slot
from .stream import stream
from .telemetry import Bytes, clock, format_bytes

log = logging.getLogger(__name__)

UNLOAD_WAIT_S = 5.0
"""How long an unload waits for a model that another thread is using."""


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
    """Owns engines by spec. Specs that mean the same here share one engine, which stays loaded between uses.

    load:      how a spec becomes an engine; a test passes its own
    settle:    a spec with what every "auto" in it means here
    footprint: the bytes that a spec will need, told before loading
    room:      who makes room on the device
    """

    def __init__(
        self,
        *,
        load: Callable[[ModelSpec], Loading] = engines.load,
        footprint: Callable[[ModelSpec], Bytes] | None = None,
        settle: Callable[[ModelSpec], ModelSpec] | None = None,
        room: Room | None = None,
    ) -> None:
        self._load = load
        self._footprint = footprint or (engines.footprint if load is engines.load else lambda _: Bytes())
        self._settle = settle or (engines.settle if load is engines.load else lambda spec: spec)
        self.room: Room = room or PlainRoom()
        self.journal = Journal()
        self._slots: dict[ModelSpec, Slot] = {}
        self._settled: dict[ModelSpec, ModelSpec] = {}
        self._lock = threading.RLock()
        self._is_closed = False

    def generate(
        self, spec: ModelSpec, requests: Sequence[Request]
    ) -> Generator[Event, None, tuple[EngineInfo, Bytes]]:
        """Answer a batch with one model, loading it if needed; see events.py for the order. Closing cancels.

        Returns what ran, and the bytes that it held at the end. Raises RuntimeClosed once the runtime closes: at the
        end of the process no thread may be left inside an engine.
        """

        def reports(answer: tuple[EngineInfo, Bytes], ends: dict[int, Finished]) -> list[Report]:
            return [report_of(spec, requests[index], ends[index], *answer) for index in sorted(ends)]

        settled = self.settled(spec)
        answering = self._generate(spec, settled, requests)
        with contextlib.closing(self.journal.follow(settled, len(requests), answering, reports)) as events:
            while True:
                try:
                    event = next(events)
                except StopIteration as end:
                    answer: tuple[EngineInfo, Bytes] = end.value
                    return answer
                self._require_open()
                yield event

    def _generate(
        self, spec: ModelSpec, settled: ModelSpec, requests: Sequence[Request]
    ) -> Generator[Event, None, tuple[EngineInfo, Bytes]]:
        lease = yield from self._leasing(spec, settled)
        with lease as engine:
            try:
                yield from stream(engine, requests)
            except Exception as error:
                release_frames(error)
                raise
            return engine.info, engine.bytes

    def leasing(self, spec: ModelSpec) -> Generator[LoadProgress, None, Lease]:
        """Yield load progress, return the lease. Closing it before that drops what was half loaded."""
        return (yield from self._leasing(spec, self.settled(spec)))

    def _leasing(self, spec: ModelSpec, settled: ModelSpec) -> Generator[LoadProgress, None, Lease]:
        slot = self._slot(settled, spec)
        if slot.used_by == threading.get_ident():
            raise RuntimeError(f"{spec.model} is leased twice by one thread.")
        slot.lock.acquire()
        slot.used_by, slot.must_leave, slot.spec, slot.asked = threading.get_ident(), False, settled, spec
        try:
            engine = yield from self._make_resident(slot)
        except BaseException as error:
            release_frames(error)
            self._release(slot)
            gc.collect()
            self.room.release_cached()
            raise
        return Lease(engine, lambda: self._release(slot))

    def _make_resident(self, slot: Slot) -> Generator[LoadProgress, None, Engine]:
        """The slot's engine, on its device: as it stands, back from where it was parked, or loaded."""
        if slot.engine and not slot.is_parked and isinstance(slot.engine, Parkable) and not slot.engine.is_in_place:
            log.warning("%s was moved from outside; loading it again", slot.spec.model)
            self._close_engine(slot)
        if isinstance(slot.engine, Mortal) and not slot.engine.is_alive:
            log.warning("%s ended by itself; loading it again", slot.spec.model)
            self._close_engine(slot)
        engine = slot.engine
        if engine and not slot.is_parked:
            self.room.reserve(slot.spec, max(slot.full_bytes, engine.bytes.device))
            return engine
        kind: MarkKind = "load"
        began, verb = clock(), "loaded"
        if engine and isinstance(engine, Parkable):
            self.room.reserve(slot.spec, slot.full_bytes)
            yield from self._unpark(slot, engine)
            slot.is_parked, verb, kind = False, "brought back", "return"
            slot.num_returns += 1
        else:
            self._replace_others(slot)
            slot.computed = self._footprint(slot.asked)
            slot.full_bytes = slot.computed.device
            check_fits(slot.spec, slot.computed, self.room)
            self.room.reserve(slot.spec, slot.full_bytes)
            slot.engine = engine = yield from self._load(slot.asked)
            if engine.info.capabilities.is_remote and engine.bytes.device:
                self.room.reserve(slot.spec, engine.bytes.device)  # a server holds its bytes already: others now know
        slot.num_loads += 1
        slot.load_s = clock() - began
        slot.full_bytes = engine.bytes.device
        self._note(kind, slot, began, slot.full_bytes)
        log.info(
            "%s %s: %s in %.1f s (computed %s)",
            verb,
            slot.spec.model,
            format_bytes(slot.full_bytes),
            slot.load_s,
            format_bytes(slot.computed.device),
        )
        return engine

    def _note(self, kind: MarkKind, slot: Slot, began: float, num_bytes: int) -> None:
        held = sum(one.bytes.device for one in self._loaded())
        self.journal.note(kind, slot.spec, seconds=clock() - began, num_bytes=num_bytes, held_bytes=held)

    def _unpark(self, slot: Slot, engine: Parkable) -> Generator[LoadProgress, None, None]:
        """Bring a parked engine back. Without room it stays parked; one that fails otherwise is not tried again."""
        try:
            yield from engine.unpark()
        except (ResidentError, GeneratorExit):
            raise
        except BaseException:
            self._close_engine(slot)
            raise

    def _replace_others(self, slot: Slot) -> None:
        """One model, one copy: what was loaded with other options leaves, and the log says why."""
        for other in self._loaded():
            if other is slot or other.spec.model != slot.spec.model:
                continue
            if other.engine and other.engine.info.capabilities.is_remote:
                continue
            changes = "; ".join(slot.spec.differences(other.spec))
            log.info("reloading %s because its options changed: %s", slot.spec.model, changes)
            self._with_idle(other, self._close_engine)

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

    def settled(self, spec: ModelSpec) -> ModelSpec:
        """The spec under which a spec's model stands here, so that two spellings of one thing are one model.

        A spec that cannot be settled stays as it is: loading it tells why.
        """
        known = self._slots.get(self._standing(spec))
        if known is None or known.engine is None:
            try:
                made = self._settle(spec)
            except ResidentError:
                made = spec
            self._settled[spec] = next((slot.spec for slot in self._loaded() if slot.answers(made)), made)
        return replace(self._settled.get(spec, spec), when_idle=spec.when_idle, host_copy_bytes=spec.host_copy_bytes)

    def _standing(self, spec: ModelSpec) -> ModelSpec:
        """The same as far as it was settled before, without asking an engine."""
        return self._settled.get(spec, spec)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeClosed("The runtime is closed. Restart ComfyUI to use it again.")

    def _slot(self, settled: ModelSpec, asked: ModelSpec) -> Slot:
        with self._lock:
            self._require_open()
            return self._slots.setdefault(settled, Slot(settled, asked))

    def _release(self, slot: Slot) -> None:
        try:
            slot.note_size()
            slot.last_used_at = clock()
            leaves, slot.must_leave = slot.must_leave, False
            if leaves:
                self._evict_engine(slot)
            self.room.settle(slot.spec)
        finally:
            slot.used_by = None
            slot.lock.release()
        if slot.must_leave:  # told so while this went on
            self._with_idle(slot, self._evict_engine)

    def _loaded(self) -> list[Slot]:
        with self._lock:
            return [slot for slot in self._slots.values() if slot.engine]

    def residents(self, spec: ModelSpec | None = None) -> list[Resident]:
        """The loaded and parked models, in the order of their first lease; or that of one spec."""
        return [Resident.of(slot, engine) for slot in self._of(spec) if (engine := slot.engine)]

    def num_loads(self, spec: ModelSpec | None = None) -> int:
        """How often the spec, or any, came onto its device since this runtime began."""
        return sum(slot.num_loads for slot in self._of(spec))

    def device_bytes(self, spec: ModelSpec) -> int:
        """What the model holds on its device now. O(1), takes no lock."""
        slot = self._slots.get(self._standing(spec))
        return slot.bytes.device if slot else 0

    def observe(self, spec: ModelSpec) -> list[dict[str, object]]:
        """What the servers behind a model say of themselves now; takes no lock, and may wait for their answers."""
        slot = self._slots.get(self._standing(spec))
        return slot.engine.observe() if slot and isinstance(slot.engine, Observable) else []

    def trim(self, spec: ModelSpec, num_bytes: int) -> int:
        """Give back idle KV memory of one model; return the bytes freed, 0 while it is used."""

        def trim(slot: Slot) -> int:
            return slot.engine.trim(num_bytes) if slot.engine and not slot.is_parked else 0

        return sum(self._with_idle(slot, trim) for slot in self._of(spec))

    def evict(self, spec: ModelSpec | None = None) -> int:
        """Take one model, or all, off the device; return the device bytes freed.

        Its weights wait in host memory, if its engine and `host_copy_bytes` allow it. A model that stays in
        use is left alone, and leaves when its lease ends.
        """
        return sum(self._with_idle(slot, self._evict_engine, must_leave=True) for slot in self._of(spec))

    def unload(self, spec: ModelSpec | None = None) -> int:
        """Unload one model, or all, host copies included; return the device bytes freed.

        A model that stays in use is left alone.
        """
        return sum(self._with_idle(slot, self._close_engine) for slot in self._of(spec))

    def _of(self, spec: ModelSpec | None) -> list[Slot]:
        with self._lock:
            standing = spec and self._standing(spec)
            return [slot for one, slot in self._slots.items() if standing in (None, one)]

    def _evict_engine(self, slot: Slot) -> int:
        """Park the slot's engine, or close it; return the device bytes freed. The caller holds the slot."""
        if slot.engine is None or slot.is_parked:
            return 0
        slot.note_size()
        began, held = clock(), slot.bytes.device
        if not self._park(slot, slot.engine):
            return self._close_engine(slot)
        slot.is_parked = True
        self.room.release_cached()
        freed, copy = held - slot.bytes.device, slot.bytes.host_copy
        self._note("evict", slot, began, freed)
        log.info("evicted %s: %s freed, %s wait in host memory", slot.spec.model, *map(format_bytes, (freed, copy)))
        return freed

    def _park(self, slot: Slot, engine: Engine) -> bool:
        if not isinstance(engine, Parkable):
            log.info("%s keeps no copy of its own: only the page cache still holds its files", engine.info.engine)
            return False
        if engine.info.device == "cpu":
            return False  # it has no other place to wait; the copies of others must not make room for that
        budget = self._host_budget(slot)
        if budget < engine.bytes.weights and not engine.info.capabilities.is_remote:
            return False
        try:
            return engine.park(budget)
        except (ResidentError, MemoryError, RuntimeError):
            log.warning("%s could not wait off the device; it is unloaded", slot.spec.model, exc_info=True)
            return False

    def _host_budget(self, slot: Slot) -> int:
        """Host memory that this model's weights may keep; older copies leave if that makes them fit."""
        others = [other for other in self._loaded() if other is not slot and other.bytes.host_copy]
        held = sum(other.bytes.host_copy for other in others)
        limit = slot.spec.host_copy_bytes
        if limit is None:
            memory = read_memory("cpu")
            limit = (memory.free + held + slot.bytes.host_copy) // 4 if memory else 0
        if slot.bytes.weights > limit:
            return 0
        for other in sorted(others, key=lambda other: other.last_used_at):
            if held + slot.bytes.weights <= limit:
                break
            held -= other.bytes.host_copy
            self._with_idle(other, self._drop_copy)
        return max(0, limit - held)

    def _drop_copy(self, slot: Slot) -> int:
        """Free a model's host memory: of a parked one all that there is."""
        if slot.is_parked:
            return self._close_engine(slot)
        return slot.engine.forget() if isinstance(slot.engine, Parkable) else 0

    def _close_engine(self, slot: Slot) -> int:
        engine, slot.engine, slot.is_parked = slot.engine, None, False
        if engine is None:
            return 0
        began, freed = clock(), engine.bytes.device
        engine.close()
        del engine
        gc.collect()
        self.room.release_cached()
        self._note("unload", slot, began, freed)
        log.info("unloaded %s: %s freed", slot.spec.model, format_bytes(freed))
        return freed

    def _with_idle(self, slot: Slot, act: Callable[[Slot], int], *, must_leave: bool = False) -> int:
        """Do something with a slot that nobody uses; 0 if nothing is loaded, or it stays in use."""
        if slot.engine is None or slot.used_by == threading.get_ident():
            return 0
        if not slot.lock.acquire(timeout=UNLOAD_WAIT_S):
            slot.must_leave = slot.must_leave or must_leave
            if not (must_leave and slot.lock.acquire(blocking=False)):  # else its lease ended just before it was told
                log.warning("%s is in use; it %s", slot.spec.model, "leaves after that" if must_leave else "stays")
                return 0
        try:
            return act(slot)
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
