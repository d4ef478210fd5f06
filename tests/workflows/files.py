"""The bundled workflows, and what of them is changed so that they run in a test."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tools.comfyui import ROOT
from tools.workflow_graph import widgets_of

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


def quick_file(workflow: dict[str, Any], info: dict[str, Any], **more: dict[str, Any]) -> dict[str, Any]:
    """The same workflow with the quick values in its widgets, and more by node type."""
    changed = copy.deepcopy(workflow)
    for node in changed["nodes"]:
        if node["type"] == "Note":
            continue
        names = [name for name, _ in widgets_of(info, node["type"])]
        for name, value in {**QUICK.get(node["type"], {}), **more.get(node["type"], {})}.items():
            node["widgets_values"][names.index(name)] = value
    return changed


def quick(prompt: dict[str, Any]) -> dict[str, Any]:
    """The same prompt with the quick values; wired inputs stay wired."""
    changed = copy.deepcopy(prompt)
    for node in changed.values():
        for name, value in QUICK.get(node["class_type"], {}).items():
            if not isinstance(node["inputs"][name], list):
                node["inputs"][name] = value
    return changed
