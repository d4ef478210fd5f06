"""What the devices do at this moment: load, power, clocks and link by NVML; memory by NVML, torch or the system."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .device_memory import read as read_memory
from .telemetry import Clock
from .telemetry import clock as default_clock

log = logging.getLogger(__name__)

PAUSE_S = (1.0, 60.0)
"""After an error of the driver it is left alone for the first, doubled each time up to the second."""


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """One device now; None is what cannot be known here.

    sm_busy, memory_busy: percent of the last sampling period in which a kernel ran, or memory was read or written:
                          busy, which is no bandwidth
    """

    device: str
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    torch_allocated_bytes: int | None = None
    sm_busy: int | None = None
    memory_busy: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None

    def as_dict(self) -> dict[str, object]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


class Devices:
    """Reads devices; a driver that fails is left alone for a while and asked again, and other sources go on."""

    def __init__(
        self, *, load_nvml: Callable[[], Any] | None = None, torch: Any = None, clock: Clock = default_clock
    ) -> None:
        self._load_nvml = load_nvml or (lambda: importlib.import_module("pynvml"))
        self._given_torch = torch
        self._clock = clock
        self._nvml: Any = None
        self._retry_at = float("-inf")
        self._pause_s = PAUSE_S[0]
        self._fault: str | None = None

    @property
    def fault(self) -> str | None:
        """Why NVML tells nothing, if so."""
        return self._fault

    @property
    def _torch(self) -> Any:
        return self._given_torch or sys.modules.get("torch")

    def read(self, device: str) -> DeviceState:
        """The state of "cpu" or "cuda:0". Makes no CUDA context, and needs none."""
        if device == "cpu":
            memory = read_memory("cpu")
            if memory is None:
                return DeviceState(device="cpu", name="system memory")
            return DeviceState(device="cpu", name="system memory", total_bytes=memory.total, used_bytes=memory.used)
        told = self._by_nvml(device)
        return DeviceState(**{"device": device, **self._by_torch(device, "total_bytes" not in told), **told})

    def _by_torch(self, device: str, with_memory: bool) -> dict[str, Any]:
        """What torch knows. Free memory is asked only where torch already has a context: asking would make one."""
        torch = self._torch
        kind, _, index = device.partition(":")
        if kind == "mps" and torch is not None and torch.backends.mps.is_available():
            return {
                "total_bytes": torch.mps.recommended_max_memory(),
                "used_bytes": torch.mps.driver_allocated_memory(),
                "torch_allocated_bytes": torch.mps.current_allocated_memory(),
            }
        if torch is None or kind != "cuda" or not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return {}
        told = {
            "name": torch.cuda.get_device_name(device),
            "torch_reserved_bytes": torch.cuda.memory_reserved(device),
            "torch_allocated_bytes": torch.cuda.memory_allocated(device),
        }
        has_context = told["torch_reserved_bytes"] or int(index or 0) == torch.cuda.current_device()
        if with_memory and has_context:
            free, total = torch.cuda.mem_get_info(device)
            told |= {"total_bytes": total, "used_bytes": total - free}
        return told

    def _by_nvml(self, device: str) -> dict[str, Any]:
        """What the driver tells; nothing while it is absent, or paused after an error."""
        if self._clock() < self._retry_at or not device.startswith("cuda"):
            return {}
        try:
            if self._nvml is None:
                nvml = self._load_nvml()
                nvml.nvmlInit()
                self._nvml = nvml
            handle = self._handle(device)
            told = {} if handle is None else self._ask(handle)
        except ImportError:
            self._fault, self._retry_at = "the package nvidia-ml-py is not installed", float("inf")
            return {}
        except Exception as error:  # the driver's errors have no common class before NVML is there
            self._back_off(error)
            return {}
        self._fault, self._pause_s = None, PAUSE_S[0]
        return told

    def _back_off(self, error: Exception) -> None:
        self._fault = f"the driver does not answer: {error}"
        log.debug("NVML: %s; asking again in %.0f s", error, self._pause_s)
        self._retry_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
        self._nvml = None

    def _handle(self, device: str) -> Any:
        """NVML's handle of a CUDA device. CUDA may number devices otherwise and see fewer, so the UUID decides."""
        nvml, torch = self._nvml, self._torch
        index = int(device.partition(":")[2] or 0)
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            if uuid is not None:
                text = str(uuid)
                return nvml.nvmlDeviceGetHandleByUUID(text if text.startswith("GPU-") else f"GPU-{text}")
        return nvml.nvmlDeviceGetHandleByIndex(0) if nvml.nvmlDeviceGetCount() == 1 and index == 0 else None

    def _ask(self, handle: Any) -> dict[str, Any]:
        """Memory must be told; each other figure may be missing on a card, which is no error."""
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        told: dict[str, Any] = {"total_bytes": int(memory.total), "used_bytes": int(memory.total - memory.free)}
        questions: dict[str, Callable[[], Any]] = {
            "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
            "sm_busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "pcie_gen": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        }
        for name, ask in questions.items():
            try:
                told[name] = ask()
            except nvml.NVMLError as error:
                log.debug("NVML does not tell %s: %s", name, error)
        return told


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
