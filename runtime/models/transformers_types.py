"""Which types of model the installed transformers knows, read from its files: importing it takes seconds."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

from ..shell import for_shell
from .info import ModelInfo

FILES = ("auto_mappings.py", "configuration_auto.py")
"""Where transformers lists its types, in models/auto: 4.x has only the second."""

ENTRY = re.compile(r'"([\w.-]+)"[,:] "\w+Config"')


@functools.cache
def listed() -> frozenset[str]:
    """The types in transformers' own list; empty where it is not installed, or keeps its list elsewhere."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    files = (Path(found.origin).parent / "models" / "auto" / name for name in FILES)
    return frozenset(one for file in files if file.is_file() for one in ENTRY.findall(file.read_text("utf-8")))


def is_known(model_type: str) -> bool:
    """Whether transformers knows the type, or cannot be asked. Once it is loaded others may have added theirs."""
    loaded = sys.modules.get("transformers")
    if loaded is not None and hasattr(loaded, "CONFIG_MAPPING"):
        return model_type in loaded.CONFIG_MAPPING
    return not listed() or model_type in listed()


def why_unknown(info: ModelInfo) -> str | None:
    """Why this transformers has no class for the model, with both versions and a way out; None where it has one."""
    if info.format != "safetensors" or is_known(info.model_type):
        return None
    version = metadata.version("transformers")
    what = f"it is of the type {info.model_type!r}, which"
    if info.config.get("auto_map"):
        return f"{what} needs code of its own, which is never run, to work with transformers {version}"
    saved = str(info.config.get("transformers_version") or "")
    if not is_newer(saved, version):
        return f"{what} is unknown to transformers {version}: choose another model, or another engine"
    update = for_shell("pip install", f"transformers>={saved}")
    return f"{what} is unknown to transformers {version}: it needs {saved} or newer. Update with: {update}"


def is_newer(version: str, than: str) -> bool:
    """Whether a version is above another, by its numbers.

    >>> is_newer("5.2.0", than="4.57.6"), is_newer("", than="4.57.6"), is_newer("4.57.6", than="4.57.6")
    (True, False, False)
    """
    first, second = ([int(one) for one in re.findall(r"\d+", text)[:3]] for text in (version, than))
    return first > second
