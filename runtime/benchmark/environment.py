"""The environment of a benchmark: what a reader needs to compare two files of rows."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = ("torch", "transformers", "exllamav2", "exllamav3", "xllamacpp", "flash-attn", "triton")


def environment() -> dict[str, object]:
    """Python, system, processors, versions of the packages that count, GPUs, and the pack's commit."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "num_processors": os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "gpus": _gpus(),
        "commit": _commit(Path(__file__).resolve().parents[2]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, object]]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [
        {
            "name": torch.cuda.get_device_name(at),
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(at))),
            "cuda": torch.version.cuda,
        }
        for at in range(torch.cuda.device_count())
    ]


def _commit(root: Path) -> str | None:
    """The commit that is checked out, without running git; None in a copy without its history."""
    head = root / ".git" / "HEAD"
    if not head.is_file():
        return None
    text = head.read_text(encoding="ascii").strip()
    if not text.startswith("ref: "):
        return text
    ref = root / ".git" / text[5:]
    return ref.read_text(encoding="ascii").strip() if ref.is_file() else None
