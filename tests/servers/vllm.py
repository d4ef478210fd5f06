"""A real vLLM server on the CPU for tests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import MappingProxyType

from tests.servers.process import ServerProcess
from tools.vllm_env import VENV


def find_python() -> Path | None:
    """The Python of vLLM's environment: RESIDENT_TEST_VLLM, or what tools/vllm_env.py makes."""
    python = Path(os.environ.get("RESIDENT_TEST_VLLM") or VENV / "bin" / "python")
    return python if python.exists() else None


class VLLM(ServerProcess):
    """vLLM with the fp32 model; its engine runs in processes of its own, in the server's group."""

    title = "vLLM"
    model = "smollm2"
    key = "test-key-of-vllm"
    endpoint = "completions"
    tells_folder = True
    context_len = 2048
    start_s = 300.0
    env = MappingProxyType(
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
    )

    def __init__(self, python: Path, folder: Path, log: Path) -> None:
        super().__init__(log)
        self.python = python
        self._folder = folder

    def command(self) -> list[str]:
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self._folder), "--served-model-name", self.model, "--api-key", self.key]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        return [
            *command,
            "--max-model-len",
            str(self.context_len),
            "--max-num-seqs",
            "16",
            "--enable-prompt-tokens-details",
        ]

    def pids(self, name: str) -> list[int]:
        """The processes of this server's group whose title holds `name`."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                title += (entry / "comm").read_text()
                if os.getpgid(int(entry.name)) == self.pid and name in title:
                    found.append(int(entry.name))
        return found
