"""Compile ExLlamaV2's extension in a process of its own, with progress and, on failure, the compiler's own words."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from ..errors import EngineUnavailable
from ..shell import for_shell
from .exllamav2_install import VERSION, extensions_root, here, why_no_wheel

COMPILE = """
import os, re, torch
arches = {"%d.%d" % torch.cuda.get_device_capability(at) for at in range(torch.cuda.device_count())}
if arches:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ";".join(sorted(arches)))
import exllamav2.ext
"""
"""The architectures are named: the package's own reading of them fails on ones such as sm_90a."""

POLL_S = 1.0
ERROR_LINE = re.compile(r"(error|FAILED|fatal|No such file|not found)", re.IGNORECASE)
NUM_SOURCES = 47


def check_tools() -> None:
    """Raise EngineUnavailable for the first thing that compiling needs and is not here."""
    place = here()
    if place.cuda is None:
        raise EngineUnavailable(f"ExLlamaV2 cannot be compiled here: {why_no_wheel(place)}.")
    if importlib.util.find_spec("exllamav2") is None:
        raise EngineUnavailable(f"First: {for_shell(f'pip install --no-deps exllamav2=={VERSION}')}")
    nvcc = _nvcc()
    if nvcc is None:
        raise EngineUnavailable(
            f"Compiling needs nvcc, and there is none. Install the CUDA {place.cuda} toolkit, or set CUDA_HOME to it."
        )
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.", told)
    if found and found[1] != place.cuda.split(".")[0]:
        raise EngineUnavailable(
            f"{nvcc} is CUDA {found[1]}, and torch is built for CUDA {place.cuda}. Set CUDA_HOME to a matching toolkit."
        )
    for tool, package in (("c++", "a C++ compiler"), ("ninja", f"ninja ({for_shell('pip install ninja')})")):
        if os.name != "nt" and shutil.which(tool) is None and importlib.util.find_spec(tool) is None:
            raise EngineUnavailable(f"Compiling needs {package}. Install it and try again.")


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")


def build(*, num_jobs: int, code: str = COMPILE) -> Iterator[str]:
    """Yield progress lines while compiling; raises EngineUnavailable with the compiler's words.

    Closing it ends the compiler.
    """
    check_tools()
    began = time.monotonic()
    environment = {**os.environ, "MAX_JOBS": str(num_jobs), "EXLLAMA_NO_FLASH_ATTN": "1", "EXLLAMA_NO_XFORMERS": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                seconds = int(time.monotonic() - began)
                yield f"compiling: {_num_objects(began)} of {NUM_SOURCES} files, {seconds} s"
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            output.seek(0)
            raise EngineUnavailable(f"Compiling ExLlamaV2 failed:\n{essence(output.read())}")


def _num_objects(began: float) -> int:
    """Object files in torch's folder for this extension."""
    return sum(1 for root in (extensions_root(),) for _ in root.glob("**/exllamav2_ext/*.o"))


def essence(text: str, num_lines: int = 12) -> str:
    """The lines that tell why a compiler failed: those about errors, else the last ones."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if ERROR_LINE.search(line)]
    return "\n".join((telling or lines)[-num_lines:])
