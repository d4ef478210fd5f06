"""The English texts of all nodes, as the page takes them, and the paths of all texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.comfyui import ROOT
from tools.workflow_graph import PACK, Info

FOLDER = ROOT / "locales"


def node_texts(info: Info) -> dict[str, Any]:
    """Name, description and tooltips by node id.

    Tooltips that tell what this machine can do are left out: the page then shows those of the running server.
    """
    texts: dict[str, Any] = {}
    for node_id, described in info.items():
        if not str(described["python_module"]).endswith(f".{PACK}"):
            continue
        inputs = {}
        for kind in ("required", "optional"):
            for name in described["input_order"].get(kind, ()):
                spec = described["input"][kind][name]
                tooltip = (spec[1] if len(spec) > 1 else {}).get("tooltip")
                tells_machine = f"{node_id}.{name}" in FROM_THE_MACHINE
                inputs[name] = {"name": name, **({"tooltip": tooltip} if tooltip and not tells_machine else {})}
        outputs = {
            str(slot): {"name": name, **({"tooltip": tooltip} if tooltip else {})}
            for slot, (name, tooltip) in enumerate(
                zip(described["output_name"], described.get("output_tooltips") or [], strict=False)
            )
        }
        texts[node_id] = {
            "display_name": described["display_name"],
            "description": described["description"],
            "inputs": inputs,
            "outputs": outputs,
        }
    return dict(sorted(texts.items()))


FROM_THE_MACHINE = {"ResidentLoadLLM.engine", "ResidentLoadExLlamaV2.model", "ResidentPrompt.preset"}
"""Inputs whose tooltips are made when the server runs."""


def keys(texts: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The path of every text."""
    for key, value in texts.items():
        path = f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from keys(value, path)
        else:
            yield path


def wanted(info: Info) -> dict[Path, str]:
    """The English file; other languages are written by people, and a test compares their keys."""
    return {FOLDER / "en" / "nodeDefs.json": json.dumps(node_texts(info), indent=2, ensure_ascii=False) + "\n"}
