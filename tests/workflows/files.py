"""The bundled workflows, and what of them is changed so that they run in a test."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tools.comfyui import ROOT

FOLDER = ROOT / "workflows"
GOLDEN = ROOT / "tests" / "golden"
FILES = sorted(FOLDER.glob("*.json"))
NAMES = [path.stem for path in FILES]


def read(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return workflow


QUICK: dict[str, dict[str, Any]] = {
    "CheckpointLoaderSimple": {"ckpt_name": "tiny-sd1.ckpt"},
    "KSampler": {"steps": 2},
    "EmptyLatentImage": {"width": 64, "height": 64},
    "ResidentGenerate": {"max_tokens": 6},
    "ResidentBenchmark": {"contexts": "40", "output_tokens": 4, "repeats": 1, "warmup": 0},
}
"""Values that make a run take seconds; all others are those of the file."""


def quick(prompt: dict[str, Any]) -> dict[str, Any]:
    """The same prompt with the quick values; wired inputs stay wired."""
    changed = copy.deepcopy(prompt)
    for node in changed.values():
        for name, value in QUICK.get(node["class_type"], {}).items():
            if not isinstance(node["inputs"][name], list):
                node["inputs"][name] = value
    return changed
