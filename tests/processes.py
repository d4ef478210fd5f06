"""The processes that llama.cpp runs in, as the system sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.engines.llamacpp_process import CHILD

PATIENCE_S = 60.0


def children(parent: int | None = None) -> list[int]:
    """Ids of the llama.cpp processes that a process, this one by default, has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            _, _, after = (entry / "stat").read_text().rpartition(")")
            is_ours = int(after.split()[1]) == (parent or os.getpid())
            if is_ours and os.fsencode(CHILD.name) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_for_child(parent: int | None = None) -> int:
    """The one llama.cpp process of a process, as soon as it is there."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        if found := children(parent):
            [pid] = found
            return pid
        time.sleep(0.002)
    raise TimeoutError(f"no llama.cpp within {PATIENCE_S:g} s")


@contextlib.contextmanager
def frozen_in_load(parent: int | None = None) -> Iterator[Callable[[], int]]:
    """Stop the next llama.cpp process when it has its library; gives a call for its id, which waits for it."""

    def freeze() -> int:
        pid = wait_for_child(parent)
        while "xllamacpp" not in Path(f"/proc/{pid}/maps").read_text():
            time.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)
        return pid

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(freeze).result


def is_gone(pid: int) -> bool:
    """Whether a process ends within the time, with its last thread; its parent need not have asked for it."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            is_last = len(os.listdir(f"/proc/{pid}/task")) == 1
        except OSError:
            return True
        if state in "ZX" and is_last:
            return True
        time.sleep(0.02)
    return False
