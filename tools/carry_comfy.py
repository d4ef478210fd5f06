"""Copy the part of ComfyUI that manages memory, to run it on a machine without ComfyUI.

    python -m tools.carry_comfy [FOLDER]      default: .build/carry

Three files: `model_management` and what it imports. Put FOLDER on the path of the other machine's Python.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tools.comfyui import BUILD, find_comfyui

FILES = ("comfy/model_management.py", "comfy/cli_args.py", "comfy/options.py")


def main(folder: Path) -> None:
    source = find_comfyui()
    for name in FILES:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
    print(f"{len(FILES)} files of {source} are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILD / "carry")
