"""Which Python the set-up takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.comfyui import ROOT


def find(
    *names: str, folder: Path, fitting: tuple[str, ...] = (), python: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the script on a machine that has the named Pythons; those in `fitting` are of a version that fits."""
    for name in names:
        program = folder / name
        program.write_text(f"#!/bin/sh\nexit {0 if name in fitting else 1}\n")
        program.chmod(0o755)
    return subprocess.run(
        ["/bin/sh", ROOT / "tools" / "find_python.sh"],
        env={"PATH": str(folder), "PYTHON": python},
        capture_output=True,
        text=True,
    )


def test_the_first_python_that_fits_is_taken(tmp_path: Path):
    found = find("python3.11", "python3.12", "python3", folder=tmp_path, fitting=("python3.12", "python3"))

    assert found.stdout.strip() == str(tmp_path / "python3.12")


def test_a_named_python_goes_before_those_on_the_path(tmp_path: Path):
    found = find("python3.11", "mine", folder=tmp_path, fitting=("python3.11", "mine"), python="mine")

    assert found.stdout.strip() == str(tmp_path / "mine")


def test_no_python_that_fits_is_told_in_a_sentence(tmp_path: Path):
    found = find("python3", folder=tmp_path)

    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr == (
        "No Python 3.11, 3.12 or 3.13 was found. Install one, or name it: make run PYTHON=/path/to/python3.11\n"
    )


def test_a_named_python_that_does_not_fit_is_told_by_its_name(tmp_path: Path):
    found = find("python3.11", "old", folder=tmp_path, fitting=("python3.11",), python="old")

    assert found.returncode == 1
    assert found.stderr.startswith("PYTHON is old, which is not a Python 3.11, 3.12 or 3.13.")
