"""What the monitor shows: one Runtime and its devices at this moment, as JSON values, without any text of a prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from .device_memory import resolve
from .devices import Devices, DeviceState
from .journal import Mark, Run, Usage, short_name
from .request import ModelSpec
from .runtime import Runtime
from .slot import Resident
from .telemetry import Clock, without_nan
from .telemetry import clock as default_clock

log = logging.getLogger(__name__)

State = dict[str, object]

CACHED_S = 0.4
"""Answers younger than this are given again, unless a model or a run has come or gone: many pages cost one look."""
NUM_SAMPLES = 600


def model_id(spec: ModelSpec) -> str:
    """A short name of a spec that tells nothing and stays the same for equal specs."""
    identity = dataclasses.replace(spec, when_idle="keep", host_copy_bytes=None)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:12]


class Monitor:
    """Reads the state when it is asked, and never otherwise.

    list_devices: which devices to show
    is_kept:      whether a model that is to leave after its run was told to stay
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        list_devices: Callable[[], Sequence[str]] = lambda: ("cpu",),
        is_kept: Callable[[ModelSpec], bool] = lambda _: False,
        devices: Devices | None = None,
        clock: Clock = default_clock,
        wall: Clock = time.time,
    ) -> None:
        self._runtime = runtime
        self._list_devices = list_devices
        self._is_kept = is_kept
        self._devices = devices or Devices()
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._state: State = {}
        self._version = -1
        self._samples: deque[dict[str, object]] = deque(maxlen=NUM_SAMPLES)
        self._id = uuid.uuid4().hex

    def find(self, model: str) -> ModelSpec | None:
        """The spec of a loaded or parked model by the id that the state tells; None if there is none."""
        return next((one.spec for one in self._runtime.residents() if model_id(one.spec) == model), None)

    def forget(self) -> None:
        """Something was changed: the next answer is read anew."""
        self._read_at = float("-inf")

    def read(self, *, since: float = 0.0, after: int = 0) -> State:
        """The state: `samples` later than `since` (wall seconds), and last runs with numbers above `after`."""
        with self._lock:
            version = self._runtime.journal.version
            if self._clock() - self._read_at >= CACHED_S or version != self._version:
                self._state, self._read_at, self._version = self._look(), self._clock(), version
                self._sample()
            return {
                **self._state,
                "samples": [one for one in self._samples if float(str(one["at"])) > since],
                "runs": [self._run(run) for run in self._runtime.journal.last_runs() if run.number > after],
            }

    def _look(self) -> State:
        residents = self._runtime.residents()
        places = {one.spec: _place(one) for one in residents}
        shown = dict.fromkeys([*self._list_devices(), *(place for place in places.values() if place)])
        live = self._runtime.journal.live()
        return {
            "version": 1,
            "monitor": self._id,
            "at": self._wall(),
            "devices": [
                self._device(self._devices.read(name), [one for one in residents if places[one.spec] == name])
                for name in shown
            ],
            "driver_fault": self._devices.fault,
            "models": [self._model(one, live) for one in residents],
            "live": [self._live(run) for run in live],
        }

    def _sample(self) -> None:
        """One point of the curves: they hold what was looked at, since nothing is read while nobody looks."""
        devices, live = self._state["devices"], self._runtime.journal.live()
        assert isinstance(devices, list)
        while self._samples and self._samples[-1]["at"] > self._state["at"]:  # type: ignore[operator]
            self._samples.pop()  # the wall clock was set back: pages would take nothing new until it has caught up
        rates = [rate for run in live if (rate := run.tokens_per_s()) is not None]
        self._samples.append(
            {
                "at": self._state["at"],
                "tokens_per_s": sum(rates) if rates else None,
                "used": {one["device"]: one["used_bytes"] for one in devices},
            }
        )

    @staticmethod
    def _device(state: DeviceState, residents: Sequence[Resident]) -> State:
        """A device with its memory split: what our models hold, what others hold, what is free."""
        held = [one.bytes for one in residents]
        parts: dict[str, int | None] = {
            "weights": sum(one.weights for one in held),
            "kv_cache": sum(one.kv_cache for one in held),
            "other_llm": sum(one.captured + one.scratch for one in held),
            "others": None,
            "free": None,
        }
        if state.total_bytes is not None and state.used_bytes is not None:
            parts["others"] = max(0, state.used_bytes - sum(one.device for one in held))
            parts["free"] = state.total_bytes - state.used_bytes
        return {**state.as_dict(), "parts": parts}

    def _model(self, one: Resident, live: Sequence[Run]) -> State:
        usage = self._runtime.journal.usage.get(one.spec, Usage())
        used = max((run.context_used for run in live if run.spec == one.spec), default=usage.context_used)
        info = one.info
        return {
            "id": model_id(one.spec),
            "name": short_name(info.model),
            "engine": info.engine,
            "device": info.device,
            "dtype": info.dtype,
            "attention": info.attention,
            "kv_cache": info.kv_cache,
            "context_len": info.context_len,
            "context_used": used,
            "num_requests": usage.num_requests,
            "num_prompt_tokens": usage.num_prompt_tokens,
            "num_cached_tokens": usage.num_cached_tokens,
            "num_output_tokens": usage.num_output_tokens,
            "patches": list(info.patches),
            "warnings": list(info.warnings),
            "bytes": one.bytes.as_dict(),
            "computed_bytes": one.computed.as_dict(),
            "num_loads": one.num_loads,
            "num_returns": one.num_returns,
            "load_s": one.load_s,
            "is_busy": one.is_busy,
            "is_parked": one.is_parked,
            "when_idle": one.spec.when_idle,
            "is_kept": self._is_kept(one.spec),
            "is_remote": info.capabilities.is_remote,
            "servers": self._servers(one.spec) if info.capabilities.is_remote else [],
        }

    def _servers(self, spec: ModelSpec) -> list[dict[str, object]]:
        """What servers say of themselves; one that says nonsense, or is let go of just now, costs only its own row."""
        try:
            servers: list[dict[str, object]] = without_nan(self._runtime.observe(spec))
            return servers
        except Exception:
            log.warning("the servers of %s could not be asked", spec.model, exc_info=True)
            return []

    @staticmethod
    def _live(run: Run) -> State:
        done, total = run.progress or (0, 0)
        return {
            "number": run.number,
            "model": model_id(run.spec),
            "name": short_name(run.spec.model),
            "num_items": run.num_items,
            "phase": run.phase,
            "done": done,
            "total": total,
            "unit": run.unit,
            "waits_for": run.waits_for,
            "tokens_per_s": run.tokens_per_s(),
            "ttft_s": run.ttft_s,
            "num_tokens": run.num_tokens,
            "num_cached_tokens": run.num_cached_tokens,
        }

    def _run(self, run: Run) -> State:
        ended_at = run.ended_at if run.ended_at is not None else self._clock()
        return {
            "number": run.number,
            "at": self.wall_of(ended_at),
            "name": short_name(run.spec.model),
            "num_items": run.num_items,
            "outcome": run.outcome,
            "error": run.error,
            "seconds": ended_at - run.began_at,
            "ttft_s": run.ttft_s,
            "num_tokens": run.num_tokens,
            "reports": list(run.reports),
        }

    def wall_of(self, at: float) -> float:
        """Seconds of the one clock as seconds since 1970."""
        return self._wall() - (self._clock() - at)

    def marks(self, since: float) -> list[Mark]:
        """Arrivals and departures after `since`, by the one clock."""
        return [mark for mark in self._runtime.journal.last_marks() if mark.at >= since]

    def runs(self, since: float) -> list[Run]:
        """Runs that ended after `since`, by the one clock."""
        return [run for run in self._runtime.journal.last_runs() if (run.ended_at or 0) >= since]


def _place(one: Resident) -> str | None:
    """The device that a model's bytes count against; None where they are not this machine's."""
    if one.info.capabilities.is_remote:
        return resolve(one.spec.device) if one.bytes.device else None
    return one.info.device if one.info.device != "cuda" else resolve("cuda")
