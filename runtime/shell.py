"""A line for a shell, as it works when it is pasted there: in any folder, and for the Python that runs this."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

IS_WINDOWS = os.name == "nt"
RUNTIME = str(Path(__file__).resolve().parent)
"""Python runs this folder as it runs a file."""


def for_shell(line: str, *words: str) -> str:
    """A line of the documents (`python -m runtime ...`, `pip install ...`), with this Python and this pack's place.

    words: what comes behind it, quoted
    """
    python = sys.executable or "python"
    for written, meant in (
        ("python -m runtime ", [python, RUNTIME]),
        ("pip ", [python, "-m", "pip"]),
    ):
        if line.startswith(written):
            return _joined([*meant, *line.removeprefix(written).split(), *words])
    raise ValueError(f"{line!r} is no line of the documents.")


def _joined(words: list[str]) -> str:
    if not IS_WINDOWS:
        return shlex.join(words)
    made = subprocess.list2cmdline(words)
    return f"{made} (in PowerShell with & before it)" if made.startswith('"') else made
