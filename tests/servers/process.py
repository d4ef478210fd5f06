"""A real server for tests: started in a process group of its own, which ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from runtime.engines.server.facts import num_busy, read_metrics


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class ServerProcess:
    """One server; `start` may be called again after `stop` or a kill, on the same port.

    model:        the name that the model is served by
    endpoint:     where prompts go as ids
    tells_folder: whether it names the folder with its tokenizer itself
    context_len:  of one request
    gap:          log-probability between two ids, for one whose answers depend on what else it computes
    """

    title: str
    model: str
    key: str
    endpoint: str
    tells_folder: bool
    context_len: int
    gap: Callable[..., float] | None = None
    start_s = 60.0
    env: Mapping[str, str] = MappingProxyType({})

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """What starts it in the foreground on its port."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process that was started; its group has the same number."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start the processes without waiting until they are ready."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env={**os.environ, **self.env}, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_s
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            if self.is_well():
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.title} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")

    def is_well(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def start(self) -> None:
        self.launch()
        self.wait_until_ready()

    def start_if_down(self) -> None:
        """Start anew unless the server is well: a dying one may still hold its port."""
        if not self.is_well():
            self.stop()
            self.start()

    def stop(self) -> None:
        """Kill the whole group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def num_busy(self) -> float:
        """Requests that run or wait in the server, as it counts them."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            told = num_busy(read_metrics(reply.read().decode()))
        assert told is not None
        return told

    def is_idle(self) -> bool:
        """Whether the server has nothing more to do, soon."""
        for _ in range(50):
            if self.num_busy() == 0:
                return True
            time.sleep(0.1)
        return False
