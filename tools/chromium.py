"""Find a Chromium for the browser tests, or install Debian's where that needs no question."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tools.environment import last_line
from tools.fault import Fault, told

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")


def find_chromium() -> str | None:
    """The path of a Chromium that playwright can drive: CHROMIUM, or the system's."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


def ensure_chromium() -> str:
    """The path of a Chromium, installed by apt-get if this is root on Debian; raises Fault elsewhere."""
    if found := find_chromium():
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Fault(
            f"No Chromium was found. Install it (Debian: apt-get install {' '.join(PACKAGES)}), or name one in "
            "CHROMIUM; `make test-fast` needs none."
        )
    print(f"Installing {' and '.join(PACKAGES)} by apt-get", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        ran = subprocess.run(["apt-get", *arguments], capture_output=True, text=True, env=env)
        if ran.returncode:
            reason = last_line(ran.stdout + ran.stderr, "E:")
            raise Fault(f"apt-get {arguments[0]} failed: {reason}. Install chromium by hand, or name one in CHROMIUM.")
    if found := find_chromium():
        return found
    raise Fault("apt-get installed chromium, but it is not on the PATH. Name it in CHROMIUM.")


def main() -> int:
    ensure_chromium()
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
