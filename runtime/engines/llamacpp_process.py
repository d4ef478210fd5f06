"""A llama.cpp in a process of its own: a load cannot stop this one, and a crash cannot end it.

xllamacpp holds Python's interpreter while it reads a file, which for a large one takes a minute, and llama.cpp aborts
its process when a device fails; neither may happen to the process that runs a user's graphs. On a GPU this costs a
context of its own, which goes with the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from ..errors import EngineUnavailable

log = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("llamacpp_child.py")

DEVICES_S = 120.0
"""Patience for a first look at the devices; a driver that has slept takes a while."""

END_S = 10.0
"""How long a killed process may take to be gone; the system may have to unmap a large file."""

NUM_WORDS = 20
"""Last lines of llama.cpp's own output that are kept."""

MAX_SHOWN = 300
"""Characters of them in an error."""


def _command() -> list[str]:
    """Isolated: neither the folder of the script, with modules named like SDKs, nor the environment is on its path."""
    return [sys.executable, "-I", str(CHILD)]


def _order(what: str, **more: object) -> bytes:
    found = importlib.util.find_spec("xllamacpp")
    folder = Path(found.origin).parents[1] if found and found.origin else ""
    order = {"do": what, "parent": os.getpid(), "packages": str(folder), **more}
    return json.dumps(order).encode() + b"\n"


@functools.cache
def num_gpus() -> int:
    """The GPUs that this build of llama.cpp sees; asked in a process of its own, as asking may make a context."""
    try:
        done = subprocess.run(_command(), input=_order("devices"), capture_output=True, timeout=DEVICES_S)
        told = json.loads(done.stdout or b"{}")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(
            f"llama.cpp cannot be started ({error}). Install the package xllamacpp anew."
        ) from error
    if "devices" not in told:
        said = told.get("error") or done.stderr.decode(errors="replace")[-MAX_SHOWN:] or f"code {done.returncode}"
        raise EngineUnavailable(f"The package xllamacpp does not work here: {said} Install it anew.")
    return sum("GPU" in one for one in told["devices"])


class LlamaProcess:
    """One llama.cpp server. It ends with `close`, with this process, and by its own faults.

    Linux ends it too when the thread that makes this object ends, so that thread must live as long.
    """

    def __init__(self, **order: object) -> None:
        try:
            self._process = subprocess.Popen(
                _command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a key press in the terminal is for the parent
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise EngineUnavailable(f"{sys.executable} cannot be started for llama.cpp ({error.strerror}).") from error
        self._words: deque[str] = deque(maxlen=NUM_WORDS)
        self._listener = threading.Thread(target=self._listen, name="resident-llm-llamacpp", daemon=True)
        self._listener.start()
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it ended already; `answer` will tell
            self._process.stdin.write(_order("serve", **order))
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answer(self) -> dict[str, Any]:
        """What it tells once it serves, or why it does not: `address` or `error`. Waits for it."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        told: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"error": self.last_words()}
        return told

    def last_words(self, patience_s: float = END_S) -> str:
        """How it ended, and what llama.cpp said last; empty if it has not ended within the time."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return ""
        self._listener.join(patience_s)
        said = " ".join(self._words)[-MAX_SHOWN:]
        return f"its process ended with {_name(code)}" + (f", saying: {said}" if said else ".")

    def _listen(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            log.debug("llama.cpp: %s", text)
            if text:
                self._words.append(text)

    def close(self) -> None:
        """End the process; what it held is free when this returns. Calling it again does nothing."""
        self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("llama.cpp's process %d was killed and is not gone after %g s", self.pid, END_S)
            return
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


def _name(code: int) -> str:
    """An exit code in words."""
    try:
        return f"code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
