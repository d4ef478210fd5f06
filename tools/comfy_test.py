"""Run comfy-test on the files that would be published, attached to a real ComfyUI on the CPU.

python -m tools.comfy_test   the levels of comfy-test.toml; logs and pictures of the workflows stay in .build/comfy-test

By itself comfy-test clones ComfyUI and installs it; attached (--server-url) it takes what is there. So this makes a
folder that looks as it wants: ComfyUI with this pack below custom_nodes, models, workflows whose values make a run
short, and a file that nothing imports with the nodes' names, which it does not find in a V3 pack.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pathspec

from tools.chromium import ensure_chromium
from tools.comfyui import BUILD, PACK_NAME, ROOT, ComfyUI, find_comfyui, place_model, stage
from tools.environment import make_venv, pip, python_of
from tools.fault import Fault, told
from tools.model import GGUF, MODELS, NAME

VERSION = "0.4.15"
PLACE = BUILD / "comfy-test"
WANTED = """from playwright.sync_api import sync_playwright
with sync_playwright() as playwright: print(playwright.chromium.executable_path)"""


def published() -> list[str]:
    """The files that go to the registry: the tracked ones less those that .comfyignore names."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ignored = pathspec.GitIgnoreSpec.from_lines((ROOT / ".comfyignore").read_text().splitlines())
    return [name for name in listed.split("\0") if name and (ROOT / name).exists() and not ignored.match_file(name)]


def blank_what_lacks_a_package(folder: Path) -> list[str]:
    """Empty those of ComfyUI's own node files that import a package which is not installed here; their names.

    comfy-test takes any import error for the pack's.
    """

    def is_there(name: str) -> bool:
        here = folder.parent
        return (here / name).exists() or (here / f"{name}.py").exists() or importlib.util.find_spec(name) is not None

    blanked = []
    for path in sorted(folder.glob("nodes_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in body if isinstance(node, ast.ImportFrom) and not node.level]
        if not all(is_there(name.partition(".")[0]) for name in names):
            path.write_text("NODE_CLASS_MAPPINGS = {}\n", encoding="utf-8")
            blanked.append(path.name)
    return blanked


def lay_out(tree: Path, model: Path) -> Path:
    """ComfyUI with the pack and models in it; the pack's folder."""
    from tests.tiny.checkpoint import write_checkpoint
    from tests.workflows.files import quick_file
    from tools.workflow_graph import Info

    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(stage(find_comfyui()), tree)
    blank_what_lacks_a_package(tree / "comfy_extras")
    pack = tree / "custom_nodes" / PACK_NAME
    for name in [*published(), "comfy-test.toml"]:
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, pack / name)
    for one in (model, model.parent / GGUF):
        place_model(one, tree / "models" / "LLM")
    (tree / "models" / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(tree / "models" / "checkpoints")
    with ComfyUI(tree, packs={}, root=tree) as comfy:
        info: Info = comfy.get("/object_info")
    ours = [name for name, one in info.items() if str(one["python_module"]).endswith(f".{PACK_NAME}")]
    (pack / "names.py").write_text(f"NODE_CLASS_MAPPINGS = {dict.fromkeys(ours)}\n", encoding="utf-8")
    for path in (pack / "workflows").glob("*.json"):
        short = quick_file(json.loads(path.read_text(encoding="utf-8")), dict(info))
        path.write_text(json.dumps(short, ensure_ascii=False), encoding="utf-8")
    return pack


def make_python(venv: Path) -> Path:
    """A Python with comfy-test, which sees this environment's packages too: one level imports the pack with it."""
    make_venv(venv)
    python = python_of(venv)
    wanted = f"comfy-test[screenshot]=={VERSION}"
    pip(python, "install", wanted, log=PLACE / "pip.log")
    own = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    )
    (Path(own.stdout.strip()) / "host.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    return python


def lend_chromium(python: Path, folder: Path) -> dict[str, str]:
    """Put the system's Chromium where playwright looks for the ones that it downloads; the variable that says so."""
    env = {"PLAYWRIGHT_BROWSERS_PATH": str(folder)}
    asked = subprocess.run(
        [python, "-c", WANTED], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    chrome = Path(asked.stdout.strip())
    number = chrome.relative_to(folder).parts[0].partition("-")[2]
    shell = folder / f"chromium_headless_shell-{number}" / "chrome-headless-shell-linux64" / "chrome-headless-shell"
    for place in (chrome, shell):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f'#!/bin/sh\nexec {ensure_chromium()} --no-sandbox --disable-dev-shm-usage "$@"\n')
        place.chmod(0o755)
    return env


def run(model: Path) -> int:
    """comfy-test's own exit code."""
    if not (model / "config.json").is_file():
        raise Fault(f"There is no model in {model}. `make model` puts it there.")
    logs = PLACE / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    pack = lay_out(PLACE / "ComfyUI", model)
    python = make_python(PLACE / "venv")
    env = {**os.environ, **lend_chromium(python, PLACE / "browsers"), "COMFY_TEST_LOGS_DIR": str(logs)}
    with ComfyUI(PLACE / "ComfyUI", packs={}, root=PLACE / "ComfyUI") as comfy:
        (logs / "server.log").symlink_to(comfy.log_path)
        return subprocess.run(
            [python.parent / "comfy-test", "run", "--server-url", comfy.url], cwd=pack, env=env
        ).returncode


def main() -> int:
    return run(Path(os.environ.get("RESIDENT_TEST_MODEL") or MODELS / NAME))


if __name__ == "__main__":
    sys.exit(told(main))
