"""Make .venv-vllm, the environment of the vLLM server that the tests marked `vllm` talk to (3.4 GB, three minutes).

python -m tools.vllm_env
"""

from __future__ import annotations

import sys

from tools.environment import ROOT, check_disk, check_python, install, make_venv
from tools.fault import told

VENV = ROOT / ".venv-vllm"
REQUIREMENTS = ROOT / "tools" / "requirements-vllm.txt"
NEEDED_BYTES = 6 * 10**9


def main() -> int:
    check_python()
    if not VENV.exists():
        check_disk(ROOT, NEEDED_BYTES)
    make_venv(VENV)
    install(VENV, REQUIREMENTS)
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
