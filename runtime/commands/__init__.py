"""The commands of `python -m runtime`: one file each, found by name and imported only when it is asked for.

A command module offers `HELP` (one sentence), `add_arguments(parser)` and `run(args)`, which returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Protocol, cast


class Command(Protocol):
    """What every module of this package offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def names() -> list[str]:
    """All commands, sorted, without importing any."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def load(name: str) -> Command:
    """One command's module."""
    return cast(Command, importlib.import_module(f".{name}", __package__))
