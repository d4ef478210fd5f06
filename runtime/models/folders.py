"""Where models lie, as far as that can be known without ComfyUI running."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

KEYS = ("LLM", "llm")
"""Both spellings of the folder's name are in use."""


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder that models are looked for in. `models` are names relative to it."""

    path: str
    exists: bool
    models: tuple[str, ...] = ()


def model_folders() -> list[ModelFolder]:
    """ComfyUI's LLM folders, then those of RESIDENT_MODELS, then where `make model` puts its model."""
    pack = Path(__file__).parents[2]
    comfyui = os.environ.get("COMFYUI_PATH") or (pack.parents[1] if pack.parent.name == "custom_nodes" else None)
    roots = list(_of_comfyui(Path(comfyui))) if comfyui else []
    roots += [Path(root) for root in os.environ.get("RESIDENT_MODELS", "").split(os.pathsep) if root]
    if (built := pack / ".build" / "models").is_dir():
        roots.append(built)
    return [ModelFolder(path=str(root), exists=root.is_dir(), models=tuple(_models(root))) for root in roots]


def _of_comfyui(comfyui: Path) -> Iterator[Path]:
    """Its own folder, the other spelling if there is one, and those of its extra_model_paths.yaml."""
    upper, lower = (comfyui / "models" / key for key in KEYS)
    yield upper
    if lower.is_dir() and not (upper.is_dir() and lower.samefile(upper)):
        yield lower
    extra = comfyui / "extra_model_paths.yaml"
    if not extra.is_file():
        return
    try:
        import yaml
    except ImportError:
        log.error("%s is not read: this Python has no yaml package, which ComfyUI's has", extra)
        return
    try:
        sections = yaml.safe_load(extra.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        log.error("%s cannot be read, so its folders are left out: %s", extra, " ".join(str(error).split()))
        return
    for section in sections.values() if isinstance(sections, dict) else ():
        if isinstance(section, dict):  # a section whose lines are all comments is none
            base = Path(os.path.expandvars(_text(section.get("base_path")))).expanduser()
            lines = (line.strip() for key in KEYS for line in _text(section.get(key)).splitlines())
            yield from (comfyui / base / line for line in lines if line)


def _text(value: object) -> str:
    """What ComfyUI takes for a folder or a list of folders: text, one a line."""
    return value if isinstance(value, str) else ""


def _models(root: Path) -> list[str]:
    """Folders with a config and weights, and .gguf files, at most two levels down; nothing hidden or unfinished."""
    found = [file for depth in ("*", "*/*") for file in root.glob(f"{depth}.gguf")]
    configs = [file.parent for depth in ("*", "*/*") for file in root.glob(f"{depth}/config.json")]
    found += [folder for folder in configs if any(folder.glob("*.safetensors"))]
    names = sorted(path.relative_to(root).as_posix() for path in found)
    return [name for name in names if not any(_is_unfinished(part) for part in name.split("/"))]


def _is_unfinished(name: str) -> bool:
    """Whether a folder is hidden, or still being written."""
    return name.startswith(".") or name.endswith(".partial")
