"""Make the project's virtual environments from pinned lists; standard library only.

    python -m tools.environment             .venv, to run
    python -m tools.environment test        .venv, with the test tools
    python -m tools.environment compat      .venv-compat, with the oldest transformers that we support
    python -m tools.environment quantised   .venv-quantised, with what transformers reads 4-bit folders with

A stamp per list makes the second call cheap.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.fault import Fault, told

ROOT = Path(__file__).resolve().parent.parent
LISTS = {"run": "requirements.txt"} | {kind: f"requirements-{kind}.txt" for kind in ("test", "compat", "quantised")}
BORROWERS = ("compat", "quantised")
"""Environments of a few packages; all others are those of .venv."""

PYTHONS = ((3, 11), (3, 13))
NEEDED_BYTES = 4 * 10**9
"""The environment takes 1.9 GB, the model 0.7 GB, and pip unpacks wheels beside them."""
CUDA_BYTES = 7 * 10**9
"""What a CUDA build of torch asks for beyond that: 3.5 GB of libraries, downloaded and unpacked."""


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> None:
    lowest, highest = PYTHONS
    if not lowest <= version <= highest:
        raise Fault(
            f"This is Python {version[0]}.{version[1]}; the pinned packages need 3.{lowest[1]} to 3.{highest[1]}. "
            "Name another one: make run PYTHON=/path/to/python3.11"
        )


def check_disk(folder: Path, needed_bytes: int = NEEDED_BYTES) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise Fault(
            f"{folder} has {free / 1e9:.1f} GB free, and set-up needs {needed_bytes / 1e9:.1f} GB. "
            "Free some space, or clone the project onto a larger disk."
        )


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def make_venv(venv: Path) -> None:
    """Make the environment if it is missing or its Python does not start."""
    python = python_of(venv)
    if python.exists() and subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0:
        return
    print(f"Making {venv.name} with {sys.executable}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", venv], capture_output=True, text=True)
    if made.returncode:
        reason = last_line(made.stdout + made.stderr)
        raise Fault(
            f"{sys.executable} could not make {venv}: {reason}. "
            "Its venv module must be whole; on Debian: apt-get install python3-venv"
        )


def last_line(output: str, marker: str = "ERROR") -> str:
    """The last line that holds the marker, else the last line that is not empty; without its full stop."""
    lines = [line.strip().rstrip(".") for line in output.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if marker in line), lines[-1] if lines else "it said nothing")


def pip(python: Path, *arguments: str, log: Path) -> None:
    """Run pip quietly; raises Fault with pip's own reason. The whole output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    ran = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True, env=env)
    log.write_text(ran.stdout + ran.stderr, encoding="utf-8")
    if ran.returncode:
        raise Fault(
            f"pip could not do `pip {' '.join(arguments)}`: {last_line(ran.stdout + ran.stderr)}. "
            f"Check the network and the disk, then run make again; all that pip said is in {log}."
        )


def install(venv: Path, requirements: Path) -> bool:
    """Install a pinned list as it is; False if its stamp says that this was done before.

    The lists are complete, so pip resolves nothing. torch alone is asked for once more with its dependencies: its
    CUDA build has some that its CPU build has not.
    """
    python = python_of(venv)
    text = requirements.read_text(encoding="utf-8")
    stamp = venv / f".installed-{requirements.stem}"
    state = hashlib.sha256(f"{os.path.realpath(python)}\n{text}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == state:
        return False
    check_disk(venv.parent)
    print(f"Installing {requirements.name} into {venv.name}; this takes a minute or three", flush=True)
    log = venv / "pip.log"
    pip(python, "install", "--no-deps", "-r", str(requirements), log=log)
    for line in text.splitlines():
        if line.startswith("torch=="):
            if not list(venv.glob("lib/python*/site-packages/torch-*+cpu.dist-info")):
                check_disk(venv.parent, CUDA_BYTES)
            pip(python, "install", line.strip(), log=log)
    stamp.write_text(state)
    return True


def borrow_packages(venv: Path, lender: Path) -> None:
    """Let an environment use another's packages wherever it has none of its own."""
    (site,) = venv.glob("lib/python*/site-packages")
    (lent,) = lender.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{lent}\n")


def main() -> int:
    kind = sys.argv[1] if len(sys.argv) > 1 else "run"
    check_python()
    lists = {name: ROOT / "tools" / file for name, file in LISTS.items()}
    venv = ROOT / ".venv"
    make_venv(venv)
    install(venv, lists["run"])
    if kind in ("test", *BORROWERS):
        install(venv, lists["test"])
    if kind in BORROWERS:
        borrower = ROOT / f".venv-{kind}"
        make_venv(borrower)
        install(borrower, lists[kind])
        borrow_packages(borrower, venv)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
