"""Compiled packages and what they were built for: whether one fits here, and which one would."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

BUILT_FOR = re.compile(r"cu(?P<cuda>\d+)|torch(?P<torch>\d+\.\d+)")


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What a compiled package must match. `cuda` is the version that torch was built with, None on CPU builds."""

    python: str
    torch: str | None
    cuda: str | None
    system: str = "linux_x86_64"

    @property
    def tag(self) -> str:
        """The Python tag of a wheel, as in cp312."""
        major, minor = self.python.split(".")[:2]
        return f"cp{major}{minor}"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """An installed package. `python_tags` is empty where its metadata does not tell."""

    name: str
    version: str
    python_tags: frozenset[str] = frozenset()

    @property
    def built_for(self) -> dict[str, str]:
        """The "cuda" and "torch" that its version names, as far as it names them.

        >>> Wheel(name="flash_attn", version="2.8.3+cu12torch2.6cxx11abiFALSE").built_for
        {'cuda': '12', 'torch': '2.6'}
        """
        local = self.version.partition("+")[2]
        return {key: value for found in BUILT_FOR.finditer(local) for key, value in found.groupdict().items() if value}


def installed(name: str) -> Wheel | None:
    """The installed package of that name, from its metadata alone; None where there is none."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    tags = re.findall(r"^Tag: (cp\d+)-cp", found.read_text("WHEEL") or "", flags=re.MULTILINE)
    return Wheel(name=name, version=found.version, python_tags=frozenset(tags))


def mismatch(wheel: Wheel, here: Platform) -> str | None:
    """Why the wheel cannot work here, with both versions; None where nothing speaks against it."""
    built_for = wheel.built_for
    if wheel.python_tags and here.tag not in wheel.python_tags:
        return f"{wheel.name} {wheel.version} is for {', '.join(sorted(wheel.python_tags))}, this Python is {here.tag}"
    if here.torch is None:
        return f"{wheel.name} {wheel.version} needs torch, which is not installed"
    if "torch" in built_for and built_for["torch"] != minor_version(here.torch):
        return f"{wheel.name} {wheel.version} is for torch {built_for['torch']}, torch here is {here.torch}"
    if "cuda" in built_for and here.cuda is None:
        return f"{wheel.name} {wheel.version} is for CUDA, torch here is a CPU build ({here.torch})"
    if "cuda" in built_for and here.cuda is not None and not _same_cuda(built_for["cuda"], here.cuda):
        return f"{wheel.name} {wheel.version} is for CUDA {built_for['cuda']}, torch here is for CUDA {here.cuda}"
    return None


def minor_version(version: str) -> str:
    """Major and minor of a version: '2.11' of '2.11.0+cu130'."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def _same_cuda(built_for: str, cuda: str) -> bool:
    """Whether the digits of a wheel name ('12', '128', '130') name this CUDA, by its major version."""
    return built_for[:2] == cuda.split(".")[0]


def remedy(name: str, here: Platform) -> str:
    """What to do to get the package: the wheel that would fit, or what must come first.

    >>> remedy("flash_attn", Platform(python="3.12.3", torch="2.11.0+cu130", cuda="13.0"))
    'look for a flash_attn wheel for cp312, torch 2.11, CUDA 13.0, linux_x86_64'
    """
    if here.torch is None:
        return "install torch with CUDA first"
    if here.cuda is None:
        return f"torch {here.torch} is a CPU build, and {name} needs one with CUDA"
    return f"look for a {name} wheel for {here.tag}, torch {minor_version(here.torch)}, CUDA {here.cuda}, {here.system}"
