"""Check the types of the library and the nodes, under the package name that their relative imports need."""

from __future__ import annotations

import subprocess
import sys

from tools.comfyui import BUILD, ROOT

PACKAGES = ("runtime", "nodes")


def main() -> int:
    """mypy's exit code; the pack is seen as `resident_llm` through a link."""
    place = BUILD / "mypy"
    place.mkdir(parents=True, exist_ok=True)
    link = place / "resident_llm"
    if not link.is_symlink():
        link.symlink_to(ROOT, target_is_directory=True)
    packages = [part for name in PACKAGES for part in ("-p", f"resident_llm.{name}")]
    config = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(BUILD / "mypy-cache"))
    return subprocess.run([sys.executable, "-m", "mypy", *config, *packages], cwd=place).returncode


if __name__ == "__main__":
    sys.exit(main())
