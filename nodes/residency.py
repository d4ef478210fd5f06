"""The ledger entry by which ComfyUI can evict our model, and the Room that makes room through ComfyUI.

ComfyUI keeps loaded models in a list of weak references and asks each for its bytes when another model needs
the card. An entry answers for one spec; what it is asked to do it passes on to the Runtime, which is the one
owner of the model. Members follow `comfy.model_management` (0.3.64 to 0.38); one that a later host asks for and
that is not here raises `AttributeError` with a sentence that names it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import comfy.model_management as host_memory

from ..runtime import ModelSpec, Runtime
from ..runtime.device_memory import read, release_heap
from ..runtime.telemetry import format_bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

RESIDUE_BYTES = 300_000_000
"""How much less than our ledger the device may count as freed before the log warns: contexts and workspaces stay."""


NOTICES = {
    "made_room": "{name} made room on {device}: {size}. It returns when needed.",
    "is_back": "{name} is back on {device}: {size}.",
}
"""What the user is told, in English; the page has the same in its own language, from locales/."""

Notify = Callable[[str, dict[str, str]], None]
"""Tells the user what happened: a name of NOTICES, and its values."""


def _silent(kind: str, values: dict[str, str]) -> None:
    pass


class ResidentLLM:
    """What the ledger shows as the model: its class name goes to the log, its life marks the entry as alive."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec


class LedgerEntry:
    """One model of ours in ComfyUI's ledger. Not a ModelPatcher: those work on weights that we do not hand out."""

    parent = None

    def __init__(self, runtime: Runtime, spec: ModelSpec, load_device: torch.device, notify: Notify = _silent) -> None:
        import torch

        self._runtime = runtime
        self._spec = spec
        self._full_bytes = 0
        self._is_away = False
        self._notify = notify
        self.model = ResidentLLM(spec)
        self.load_device = load_device
        self.offload_device = torch.device("cpu")
        self.clone_base_uuid = object()

    def expect(self, num_bytes: int) -> None:
        """Say what the model will hold once it is loaded and in use."""
        self._full_bytes = num_bytes

    def tell_return(self) -> None:
        """Say that the model is back, if ComfyUI had taken it off the device and it was needed again."""
        if self._is_away and (held := self.loaded_size()):
            self._is_away = False
            self._notify("is_back", self._values(held))

    def _values(self, num_bytes: int) -> dict[str, str]:
        name = os.path.basename(self._spec.model) or self._spec.model
        return {"name": name, "device": str(self.load_device), "size": format_bytes(num_bytes)}

    def model_size(self) -> int:
        """Bytes when fully loaded: weights, KV cache, captured state and scratch."""
        return max(self._full_bytes, self.loaded_size())

    def loaded_size(self) -> int:
        """Bytes on the device now."""
        return self._runtime.device_bytes(self._spec)

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.loaded_size() else self.offload_device

    def model_dtype(self) -> None:
        return None

    def model_patches_to(self, device: object) -> None:
        pass

    def model_patches_models(self) -> list[Any]:
        return []

    def get_nested_additional_models(self) -> list[Any]:
        return []

    def lowvram_patch_counter(self) -> int:
        return 0

    def is_clone(self, other: object) -> bool:
        return getattr(other, "model", None) is self.model

    def is_dynamic(self) -> bool:
        return False

    def partially_load(self, device: object, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        """Nothing: the Runtime loads right after the ledger has made room, so that loading can tell its progress.

        A sampler that loads whatever the ledger holds again does not pull an idle model in.
        """
        return 0

    def partially_unload(self, device: object, memory_to_free: float = 0, force_patch_weights: bool = False) -> int:
        """Give back idle KV memory; the bytes that the device really got back. The ledger detaches if they are few."""
        try:
            before = _free_bytes(self.load_device)
            trimmed = self._runtime.trim(self._spec, int(memory_to_free))
            if not trimmed:
                return 0
            host_memory.soft_empty_cache()
            after = _free_bytes(self.load_device)
        except Exception:
            log.exception("%s could not give back KV memory", self._spec.model)
            return 0
        freed = trimmed if before is None or after is None else max(0, min(trimmed, after - before))
        log.info("%s gave back %s of idle KV memory", self._spec.model, format_bytes(freed))
        return freed

    def detach(self, unpatch_all: bool = True) -> None:
        """Leave the device. Never raises: an error here would surface in the node of someone else."""
        if not unpatch_all:
            return
        try:
            before, held = _free_bytes(self.load_device), self.loaded_size()
            if not held:
                return
            self._runtime.evict(self._spec)
            self._tell(before, held)
        except Exception:
            log.exception("%s could not leave %s", self._spec.model, self.load_device)

    def _tell(self, before: int | None, held: int) -> None:
        after, left = _free_bytes(self.load_device), self.loaded_size()
        name, freed = self._spec.model, held - left
        if freed > 0:
            self._is_away = True
            self._notify("made_room", self._values(freed))
        if before is None or after is None:
            log.info("ComfyUI took %s off %s: %s", name, self.load_device, format_bytes(freed))
            return
        numbers = f"{format_bytes(freed)}, {format_bytes(after - before)} by the device's own count"
        level = logging.WARNING if after - before < freed - RESIDUE_BYTES else logging.INFO
        log.log(level, "ComfyUI took %s off %s: %s", name, self.load_device, numbers)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"ComfyUI asked a resident language model for {name!r}, which is not in the contract that Resident LLM "
            "knows. Update Resident LLM, or report this with your ComfyUI version."
        )


class ComfyRoom:
    """Makes room through ComfyUI's ledger. It holds the entries strongly: the ledger itself does not."""

    def __init__(self, runtime: Runtime, notify: Notify = _silent) -> None:
        self._runtime = runtime
        self._notify = notify
        self._entries: dict[ModelSpec, LedgerEntry] = {}

    def entry(self, spec: ModelSpec) -> LedgerEntry:
        """The spec's entry, made on first use."""
        if spec not in self._entries:
            self._entries[spec] = LedgerEntry(self._runtime, spec, load_device(spec), self._notify)
        return self._entries[spec]

    def reserve(self, spec: ModelSpec, num_bytes: int) -> None:
        """Enter the model into the ledger, which evicts others until `num_bytes` fit."""
        if not num_bytes:
            return
        entry = self.entry(spec)
        entry.expect(num_bytes)
        host_memory.load_models_gpu([entry])
        if not entry.loaded_size():
            host_memory.soft_empty_cache()  # what torch holds idle would look taken to an engine that looks itself

    def settle(self, spec: ModelSpec) -> None:
        """Mark the model as not in use, so that no sampler loads it along with its own models."""
        entry = self._entries.get(spec)
        if entry is not None:
            entry.tell_return()
        with contextlib.suppress(AttributeError):
            for loaded in host_memory.current_loaded_models:
                if entry is not None and loaded.model is entry:
                    loaded.currently_used = False

    def release_cached(self) -> None:
        release_heap()
        host_memory.soft_empty_cache()

    def can_free(self, spec: ModelSpec) -> tuple[str, int] | None:
        """Free memory of the device and all that the ledger could evict from it."""
        device = load_device(spec)
        evictable = sum(
            loaded.model.loaded_size()
            for loaded in list(host_memory.current_loaded_models)
            if loaded.device == device and loaded.model is not None
        )
        return str(device), int(host_memory.get_free_memory(device)) + (0 if device.type == "cpu" else evictable)


def load_device(spec: ModelSpec) -> torch.device:
    """Where the spec runs, with the device's index: the ledger compares devices by equality."""
    import torch

    ours: torch.device = host_memory.get_torch_device()
    if spec.device == "auto" or (spec.device == ours.type and ours.index is not None):
        return ours
    return torch.device(spec.device)


def _free_bytes(device: torch.device) -> int | None:
    """Free bytes by the device's own count; None on the CPU, where pages come and go for other reasons."""
    if device.type == "cpu":
        return None
    memory = read(str(device))
    return memory.free if memory else None


def enter(runtime: Runtime, notify: Notify = _silent) -> Runtime:
    """Put the Runtime under ComfyUI's ledger; doing it again changes nothing."""
    if not isinstance(runtime.room, ComfyRoom):
        runtime.room = ComfyRoom(runtime, notify)
    return runtime
