"""What this machine can run: facts for `doctor`, gathered without importing torch or an engine here."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from . import patches, wheels
from .engines import ENGINES
from .models.folders import model_folders

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "jinja2", "exllamav2", "exllamav3",
    "flash_attn", "triton", "xformers", "gptqmodel", "compressed-tensors", "bitsandbytes", "xllamacpp", "vllm",
    "aiohttp",
)  # fmt: skip
PROBE_S = 180
"""How long a probe process may take; a cold import of torch from a slow disk needs a minute."""

TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
devices = []
for index in range(torch.cuda.device_count() if cuda else 0):
    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    devices.append({"device": f"cuda:{index}", "name": name, "capability": "%d.%d" % capability,
                    "total_bytes": total, "free_bytes": free})
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
                  "archs": torch.cuda.get_arch_list() if cuda else [], "devices": devices}))
"""

FLASH_PROBE = """
import json, torch
from flash_attn import flash_attn_func
torch.manual_seed(0)
q, k, v = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3))
out = flash_attn_func(q, k, v, causal=True)
exact = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2).float() for x in (q, k, v)), is_causal=True).transpose(1, 2)
print(json.dumps({"max_error": (out.float() - exact).abs().max().item()}))
"""
FLASH_TOLERANCE = 0.01
"""Largest difference from exact attention that 16-bit rounding explains on unit-variance inputs."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a process of its own found out: `facts`, or why not."""

    facts: dict[str, object] | None = None
    fault: str | None = None


def probe(code: str, *, python: str = sys.executable) -> Probe:
    """Run code that prints one JSON object; a crash in it, even a segmentation fault, is only a sentence here."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return Probe(fault=f"no answer within {PROBE_S} s")
    except OSError as error:
        return Probe(fault=str(error))
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Probe(fault=lines[-1] if lines else f"the process ended with code {done.returncode}")
    return Probe(facts=json.loads(done.stdout.strip().splitlines()[-1]))


def look() -> dict[str, object]:
    """Everything that `doctor` shows, JSON values only; sizes in bytes."""
    packages = {name: version for name in PACKAGES if (version := _version(name))}
    torch = probe(TORCH_PROBE) if "torch" in packages else Probe(fault="torch is not installed")
    facts = torch.facts or {}
    here = wheels.Platform(
        python=platform.python_version(),
        torch=packages.get("torch"),
        cuda=_text(facts.get("cuda")),
        system=f"{platform.system()}_{platform.machine()}".lower(),
    )
    return {
        "pack": pack(),
        "python": {"version": here.python, "executable": sys.executable},
        "system": {"name": platform.platform(), "is_wsl": is_wsl(), "memory_bytes": _memory_bytes()},
        "packages": packages,
        "torch": {
            "version": here.torch,
            "cuda": here.cuda,
            "hip": facts.get("hip"),
            "archs": facts.get("archs", []),
            "fault": torch.fault,
        },
        "devices": [_cpu(), *(_with_fault(one, facts) for one in _dicts(facts.get("devices")))],
        "driver": driver(),
        "nvcc": nvcc(here.cuda),
        "flash_attn": flash_attn(here),
        "engines": [
            {"name": row.name, "title": row.title, "why_unavailable": row.why_unavailable(), "install": row.install}
            for row in ENGINES
            if row.name != "scripted"
        ],
        "patches": [asdict(state) for state in patches.registry().states()],
        "model_folders": [asdict(folder) for folder in model_folders()],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _dicts(value: object) -> list[dict[str, object]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def pack() -> dict[str, object]:
    """This pack's version and place, and other copies of it beside it, which would load twice."""
    root = Path(__file__).parents[1]
    beside = root.parent.glob("*/pyproject.toml") if root.parent.name == "custom_nodes" else ()
    copies = [file.parent for file in beside if file.parent != root and _project(file)[0] == _project(root)[0]]
    return {"version": _project(root)[1], "path": str(root), "other_copies": sorted(map(str, copies))}


def _project(path: Path) -> tuple[str | None, str | None]:
    """Name and version of a project, from its pyproject.toml or the folder of it."""
    file = path / "pyproject.toml" if path.is_dir() else path
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    name, version = (re.search(rf'^{key} = "(.+)"$', text, flags=re.MULTILINE) for key in ("name", "version"))
    return name and name[1], version and version[1]


def runs_on(capability: str, archs: Sequence[str]) -> bool:
    """Whether a build for `archs` (sm_86, sm_90a, compute_90 ...) has code for a device of this capability.

    Machine code runs on the same major version from its minor on; intermediate code (compute_) on all later ones.

    >>> runs_on("8.9", ["sm_80", "sm_86"]), runs_on("7.5", ["sm_80", "compute_80"])
    (True, False)
    """
    major, minor = map(int, capability.split("."))
    for arch in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if found is None:
            continue
        built = int(found[2]), int(found[3])
        if found[4] == "a":
            matches = built == (major, minor)
        elif found[1] == "sm":
            matches = built[0] == major and built[1] <= minor
        else:
            matches = built <= (major, minor)
        if matches:
            return True
    return False


def _with_fault(device: dict[str, object], facts: dict[str, object]) -> dict[str, object]:
    """A device with what speaks against it: a torch that has no code for it."""
    archs, capability = facts.get("archs"), device["capability"]
    fits = not isinstance(archs, list) or runs_on(str(capability), archs)
    fault = f"torch {facts['version']} has no code for capability {capability}: it has {archs}"
    return {**device, "fault": None if fits else fault}


def _memory_bytes() -> int | None:
    """System memory; None where the system does not tell it this way (Windows)."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu() -> dict[str, object]:
    return {"device": "cpu", "name": platform.processor() or platform.machine(), "num_cores": os.cpu_count()}


def is_wsl() -> bool:
    """Whether this Linux runs inside Windows, where the Windows driver serves CUDA."""
    return "microsoft" in platform.release().lower()


def driver() -> dict[str, object]:
    """The NVIDIA driver by `nvidia-smi`, and the newest CUDA that it serves."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"version": None, "max_cuda": None, "fault": "nvidia-smi is not on the PATH"}
    done = subprocess.run([tool], capture_output=True, text=True, timeout=PROBE_S)
    version = re.search(r"Driver Version: *([\d.]+)", done.stdout)
    newest = re.search(r"CUDA Version: *([\d.]+)", done.stdout)
    return {
        "version": version and version[1],
        "max_cuda": newest and newest[1],
        "fault": None if version else (done.stdout + done.stderr).strip().partition("\n")[0],
    }


def nvcc(torch_cuda: str | None) -> dict[str, object]:
    """The CUDA compiler that an engine building itself would use, and whether it fits torch."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")
    if found is None:
        return {"path": None, "version": None, "fault": "no nvcc: engines that compile themselves cannot"}
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=PROBE_S)
    version = re.search(r"release ([\d.]+)", done.stdout)
    fault = None
    if version and torch_cuda and version[1].split(".")[0] != torch_cuda.split(".")[0]:
        fault = f"nvcc is CUDA {version[1]}, torch is built for CUDA {torch_cuda}: extensions would not load"
    return {"path": found, "version": version and version[1], "fault": fault}


def flash_attn(here: wheels.Platform) -> dict[str, object]:
    """Whether flash-attn is there, fits, and computes the right numbers."""
    wheel = wheels.installed("flash_attn")
    if wheel is None:
        return {"version": None, "works": False, "fault": "not installed", "remedy": wheels.remedy("flash_attn", here)}
    fault, error = wheels.mismatch(wheel, here), None
    if fault is None:
        tried = probe(FLASH_PROBE)
        fault, error = tried.fault, (tried.facts or {}).get("max_error")
        if isinstance(error, float) and not error < FLASH_TOLERANCE:
            fault = f"its result is {error:.3g} off exact attention, more than {FLASH_TOLERANCE}"
    return {
        "version": wheel.version,
        "works": fault is None,
        "max_error": error,
        "fault": fault,
        "remedy": None if fault is None else wheels.remedy("flash_attn", here),
    }
