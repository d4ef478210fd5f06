"""A real vLLM server on the CPU for tests: started in a process group of its own, which ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

from tools.vllm_env import VENV

MODEL = "smollm2"
KEY = "test-key-of-vllm"
START_S = 300


def find_python() -> Path | None:
    """The Python of vLLM's environment: RESIDENT_TEST_VLLM, or what tools/vllm_env.py makes."""
    python = Path(os.environ.get("RESIDENT_TEST_VLLM") or VENV / "bin" / "python")
    return python if python.exists() else None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class VLLM:
    """One server; `start` may be called again after `stop` or a kill, on the same port."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        self.port = free_port()
        self.model = model
        self.log = log
        self.python = python
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        """Start the processes without waiting until they are ready."""
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", MODEL, "--api-key", KEY]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--enable-prompt-tokens-details"]
        env = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-3000:]}")

    def start(self) -> None:
        self.launch()
        self.wait_until_ready()

    def start_if_down(self) -> None:
        """Start anew unless the server is well: a dying one may still hold its port."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return
        self.stop()
        self.start()

    def pids(self, name: str) -> list[int]:
        """The processes of this server's group whose title holds `name`."""
        assert self._process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                title += (entry / "comm").read_text()
                if os.getpgid(int(entry.name)) == self._process.pid and name in title:
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """Kill the whole group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            return reply.read().decode()
