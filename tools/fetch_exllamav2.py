"""Bring ExLlamaV2's Python files (PyPI wheel, no compiled part) into .build/exllamav2 for tests; print the folder.

They are unpacked, not installed: importing an installed copy would compile. Exits with 1 and a reason where pip cannot
reach its index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "exllamav2==0.3.2"
FOLDER = Path(__file__).resolve().parents[1] / ".build/exllamav2"


def fetch() -> Path:
    """The folder with the package in it, fetched once."""
    if (FOLDER / "exllamav2" / "generator" / "dynamic.py").is_file():
        return FOLDER
    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*download, "--dest", scratch, PACKAGE], capture_output=True, text=True, timeout=300)
        if done.returncode:
            sys.exit(f"pip could not fetch {PACKAGE}: {done.stderr.strip()[-300:]}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as archive:
            archive.extractall(FOLDER)
    return FOLDER


if __name__ == "__main__":
    print(fetch())
