"""What ExLlamaV2 needs here: the exact wheel for this Python, torch and CUDA, or why none fits. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from .. import wheels
from ..shell import for_shell

VERSION = "0.3.2"
"""The one version that this adapter knows; the project is archived and no later one will come."""

RELEASE = f"https://github.com/turboderp-org/exllamav2/releases/tag/v{VERSION}"

BUILDS = {
    "2.3": ("2.3.1", ("118", "121")),
    "2.4": ("2.4.0", ("118", "121")),
    "2.5": ("2.5.0", ("118", "121")),
    "2.6": ("2.6.0", ("118", "124")),
    "2.7": ("2.7.0", ("128",)),
    "2.8": ("2.8.0", ("128",)),
    "2.9": ("2.9.0", ("128",)),
}
"""Published wheels: torch minor version -> the version in the name, CUDA versions (the release's build matrix)."""

FIRST_TORCH_OF_CP313 = {"linux_x86_64": "2.5", "win_amd64": "2.6"}


def here() -> wheels.Platform:
    """This Python, torch and CUDA, from metadata alone."""
    torch = _version("torch")
    return wheels.Platform(python=platform.python_version(), torch=torch, cuda=_torch_cuda(torch), system=_system_tag())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _system_tag() -> str:
    machine = platform.machine().lower().replace("amd64", "x86_64")
    return "win_amd64" if os.name == "nt" else f"{platform.system().lower()}_{machine}"


def _torch_cuda(torch: str | None) -> str | None:
    """The CUDA version that torch was built with: from its version, or from the file where it writes it down."""
    if torch is None:
        return None
    if found := re.search(r"\+cu(\d+)(\d)$", torch):
        return f"{found[1]}.{found[2]}"
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    written = re.search(r"^cuda[^=]*= *'([\d.]+)'", text, flags=re.MULTILINE)
    return written[1] if written else None


def wheel_name(place: wheels.Platform) -> str | None:
    """The published wheel that fits; None where none does.

    >>> wheel_name(wheels.Platform(python="3.12.3", torch="2.8.0+cu128", cuda="12.8"))
    'exllamav2-0.3.2+cu128.torch2.8.0-cp312-cp312-linux_x86_64.whl'
    """
    return None if why_no_wheel(place) else _name(place)


def _name(place: wheels.Platform) -> str:
    torch, cudas = BUILDS[wheels.minor_version(str(place.torch))]
    cuda = next(one for one in reversed(cudas) if one[:2] == str(place.cuda).split(".")[0])
    return f"exllamav2-{VERSION}+cu{cuda}.torch{torch}-{place.tag}-{place.tag}-{place.system}.whl"


def why_no_wheel(place: wheels.Platform) -> str | None:
    """Why no published wheel fits; None where one does."""
    if place.torch is None:
        return "torch is not installed"
    if place.cuda is None:
        return f"torch {place.torch} is a CPU build, and ExLlamaV2 runs on CUDA only"
    if place.system not in FIRST_TORCH_OF_CP313:
        return f"there are no wheels for {place.system}"
    minor = wheels.minor_version(place.torch)
    if minor not in BUILDS:
        return f"wheels end at torch 2.9 (and begin at 2.3); torch here is {place.torch}"
    if not any(one[:2] == place.cuda.split(".")[0] for one in BUILDS[minor][1]):
        return f"wheels for torch {minor} are for CUDA {', '.join(BUILDS[minor][1])}; torch here has CUDA {place.cuda}"
    if place.tag not in ("cp310", "cp311", "cp312", "cp313"):
        return f"wheels are for Python 3.10 to 3.13; this is {place.python}"
    if place.tag == "cp313" and minor < FIRST_TORCH_OF_CP313[place.system]:
        return f"wheels for Python 3.13 begin at torch {FIRST_TORCH_OF_CP313[place.system]}"
    return None


def advice(place: wheels.Platform | None = None) -> str:
    """One or two sentences: what to install here, or why nothing fits and what is left."""
    place = place or here()
    if name := wheel_name(place):
        return f"Install {name} from {RELEASE}"
    reason = why_no_wheel(place)
    if place.cuda is None:
        return f"No ExLlamaV2 wheel fits: {reason}. Use the transformers or llama.cpp engine, or a server."
    return (
        f"No ExLlamaV2 wheel fits: {reason}. Use another engine, or compile it here (minutes; needs nvcc of CUDA "
        f"{place.cuda} and a C++ compiler): {for_shell('python -m runtime build exllamav2')}"
    )


def extensions_root() -> Path:
    """Where torch keeps extensions that it compiles."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(base).expanduser() / "torch_extensions"


def built_extension() -> Path | None:
    """The extension that `build` compiled for this Python; None where an installed one is importable or none is.

    Torch names the folder py312_cu130 for Python 3.12 and CUDA 13.0.
    """
    if "exllamav2_ext" in sys.modules or importlib.util.find_spec("exllamav2_ext") is not None:
        return None
    place = here()
    folder = extensions_root()
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        cuda = f"cu{place.cuda.replace('.', '')}" if place.cuda else "cpu"
        folder = folder / f"py{place.tag[2:]}_{cuda}"
    files = sorted((folder / "exllamav2_ext").glob("exllamav2_ext*.so")) + sorted(
        (folder / "exllamav2_ext").glob("exllamav2_ext*.pyd")
    )
    return files[0] if files else None


def why_unavailable() -> str | None:
    """Why ExLlamaV2 cannot run here, for the engine table; None where it can. Imports neither it nor torch."""
    if importlib.util.find_spec("torch") is None:
        return "the package torch is not installed"
    place = here()
    if place.cuda is None:
        return f"torch {place.torch} is a CPU build, and ExLlamaV2 runs on CUDA only"
    if importlib.util.find_spec("exllamav2") is None:
        return f"the package exllamav2 is not installed. {advice(place)}"
    installed = wheels.installed("exllamav2")
    if installed is not None and installed.version.partition("+")[0] != VERSION:
        return f"exllamav2 {installed.version} is installed; this adapter knows {VERSION} only. {advice(place)}"
    if installed is not None and (reason := wheels.mismatch(installed, place)):
        return f"{reason}. {advice(place)}"
    if importlib.util.find_spec("exllamav2_ext") is None and built_extension() is None:
        return f"exllamav2 is installed without its compiled part. {advice(place)}"
    return None
