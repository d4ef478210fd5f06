"""The place of one spec in the Runtime, and what the monitor sees of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from .engines.base import Engine, EngineInfo
from .request import ModelSpec
from .telemetry import Bytes


@dataclass(eq=False)
class Slot:
    """A spec, its engine while loaded or parked, and the lock that one user at a time holds.

    spec:         settled: what every "auto" in `asked` means here
    asked:        what the last lease asked for, by which the model is loaded
    computed:     bytes told before loading
    full_bytes:   most device bytes that the model was seen to hold, or `computed` before its first load
    must_leave:   an eviction came while it was in use; it happens when the lease ends
    last_used_at: when its last lease ended, in seconds of the one clock
    """

    spec: ModelSpec
    asked: ModelSpec
    engine: Engine | None = None
    is_parked: bool = False
    computed: Bytes = field(default_factory=Bytes)
    full_bytes: int = 0
    num_loads: int = 0
    num_returns: int = 0
    load_s: float = 0.0
    last_used_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    used_by: int | None = None
    must_leave: bool = False

    @property
    def bytes(self) -> Bytes:
        """What the engine holds now; nothing without one."""
        engine = self.engine
        return engine.bytes if engine else Bytes()

    def answers(self, spec: ModelSpec) -> bool:
        """Whether the loaded model is what this settled spec would load: "auto" attention came out as the one named."""
        is_named = self.engine is not None and self.engine.info.attention == spec.attention
        return is_named and self.spec.attention == "auto" and replace(spec, attention="auto") == self.spec

    def note_size(self) -> None:
        """Remember the most that the model was seen to hold on its device."""
        self.full_bytes = max(self.full_bytes, self.bytes.device)


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A loaded or parked model as the monitor sees it.

    bytes:     measured now
    computed:  told before loading, from headers and config
    num_loads: times that it came onto the device, `num_returns` of them from where it was parked
    load_s:    seconds of the last of them
    is_parked: its weights wait off the device
    """

    spec: ModelSpec
    info: EngineInfo
    bytes: Bytes
    computed: Bytes
    num_loads: int
    num_returns: int
    load_s: float
    is_busy: bool
    is_parked: bool

    @classmethod
    def of(cls, slot: Slot, engine: Engine) -> Resident:
        return cls(
            spec=slot.spec,
            info=engine.info,
            bytes=engine.bytes,
            computed=slot.computed,
            num_loads=slot.num_loads,
            num_returns=slot.num_returns,
            load_s=slot.load_s,
            is_busy=slot.lock.locked(),
            is_parked=slot.is_parked,
        )
