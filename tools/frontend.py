"""Another version of ComfyUI's page than the one that its Python environment has: unpacked below .build, not installed.

python -m tools.frontend [VERSION]   print the folder, for ComfyUI's --front-end-root
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.comfyui import BUILD
from tools.fault import Fault, told

NEWEST = "1.58.1"
PACKAGE = "comfyui-frontend-package"
INSIDE = "comfyui_frontend_package/static/"


def frontend(version: str = NEWEST, build: Path = BUILD) -> Path:
    """The folder with the page of this version; its wheel is fetched through pip the first time."""
    folder = build / f"frontend-{version}"
    if folder.is_dir():
        return folder
    build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        done = subprocess.run([*command, f"{PACKAGE}=={version}"], capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise Fault(f"pip could not fetch {PACKAGE} {version}: {done.stderr.strip()[-300:]}")
        unpack(wheels[0], Path(scratch) / "page")
        (Path(scratch) / "page" / INSIDE).rename(folder)
    return folder


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the page's files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(INSIDE)])


def main() -> int:
    print(frontend(*sys.argv[1:2]))
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
