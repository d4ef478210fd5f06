"""The few names of ComfyUI that nodes/ uses, doing next to nothing: enough to import the pack without ComfyUI."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent.parent


class Interrupted(Exception):
    """What ComfyUI raises when the user presses cancel."""


class HostOutOfMemory(RuntimeError):
    """What torch raises when the device is full."""


class ComfyNode:
    pass


class ComfyExtension:
    pass


@dataclasses.dataclass
class Schema:
    node_id: str
    display_name: str = ""
    category: str = ""
    inputs: list = dataclasses.field(default_factory=list)
    outputs: list = dataclasses.field(default_factory=list)


def stub_modules(models_dir: Path) -> dict[str, types.ModuleType]:
    """Modules by name, to be put into sys.modules."""
    io = MagicMock(ComfyNode=ComfyNode, Schema=Schema)
    management = types.SimpleNamespace(
        is_interrupted=False,
        OOM_EXCEPTION=HostOutOfMemory,
        cpu_mode=lambda: True,
    )

    def throw_exception_if_processing_interrupted() -> None:
        if management.is_interrupted:
            management.is_interrupted = False
            raise Interrupted

    management.throw_exception_if_processing_interrupted = throw_exception_if_processing_interrupted
    server = types.SimpleNamespace(
        client_id=None, sockets={}, last_prompt_id="p", send_sync=MagicMock(), routes=MagicMock()
    )
    paths: dict[str, tuple[list[str], set[str]]] = {}
    contents = {
        "comfy": {"model_management": management, "utils": MagicMock(), "__path__": []},
        "comfy.model_management": vars(management),
        "comfy.utils": {"ProgressBar": MagicMock()},
        "comfy.comfy_types": {"IO": types.SimpleNamespace(ANY="*")},
        "comfy_api": {"__path__": []},
        "comfy_api.latest": {"io": io, "ComfyExtension": ComfyExtension},
        "folder_paths": {
            "models_dir": str(models_dir),
            "get_user_directory": lambda: str(models_dir.parent / "user"),
            "folder_names_and_paths": paths,
            "add_model_folder_path": lambda key, path: paths.setdefault(key, ([], set()))[0].append(path),
        },
        "server": {"PromptServer": types.SimpleNamespace(instance=server)},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(content)
    modules["comfy"].model_management = management
    return modules


def load_pack(name: str = "resident_llm") -> types.ModuleType:
    """Import the pack by its path, as ComfyUI does."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
