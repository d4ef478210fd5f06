"""Write workflows/*.json and locales/en from the nodes of a real ComfyUI, which starts for it.

python -m tools.workflows           write them
python -m tools.workflows --check   say which are out of step, and exit 1
python -m tools.workflows --golden  also keep a copy of those of this version that have none yet, with their values
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools import locales
from tools.comfyui import ROOT, ComfyUI
from tools.fault import told
from tools.workflow_graph import Info, build, dumps, to_prompt
from tools.workflow_set import WORKFLOWS

FOLDER = ROOT / "workflows"
GOLDEN = ROOT / "tests" / "golden"


def version() -> str:
    """The pack's version, as pyproject.toml has it."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("version = "))


def wanted(info: Info) -> dict[Path, str]:
    """What each file must hold."""
    files = {FOLDER / f"{one.name}.json": dumps(build(one, info, version())) for one in WORKFLOWS}
    return files | locales.wanted(info)


def stale(info: Info) -> dict[Path, str]:
    """The files that do not hold it, with what they must hold."""
    return {
        path: text
        for path, text in wanted(info).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def golden(info: Info) -> dict[Path, str]:
    """Copies that this version lacks: the workflow, and its values by name. One that is there is never changed."""
    files = {}
    for one in WORKFLOWS:
        path = GOLDEN / version() / f"{one.name}.json"
        if not path.exists():
            made = build(one, info, version())
            files[path] = json.dumps({"workflow": made, "prompt": to_prompt(made, info)}, ensure_ascii=False) + "\n"
    return files


def main(argv: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as base, ComfyUI(base) as comfy:
        info = comfy.get("/object_info")
    found = stale(info) | (golden(info) if "--golden" in argv else {})
    for path, text in found.items():
        if "--check" in argv:
            name = path.relative_to(ROOT)
            print(f"{name} is out of step with the nodes. Run: python -m tools.workflows", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if found and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(told(lambda: main(sys.argv[1:])))
