"""An iterator that runs in a thread of its own, so that whoever waits for it can look up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

Item = TypeVar("Item")

PATIENCE_S = 0.25
AHEAD = 4
"""Items that may wait to be taken."""


class _End:
    """The iterator ended, by itself or by an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def read_ahead(make: Callable[[], Iterator[Item]]) -> Generator[Item | None, None, None]:
    """The iterator's items; None after each quarter of a second without one. Its error is raised here.

    Closing leaves at once: the thread ends by itself at its next item, and what it read is dropped.
    """
    ready: queue.Queue[Item | _End] = queue.Queue(AHEAD)
    is_closed = threading.Event()

    def put(item: Item | _End) -> None:
        while not is_closed.is_set():
            try:
                return ready.put(item, timeout=PATIENCE_S)
            except queue.Full:
                continue

    def work() -> None:
        end = _End()
        try:
            for item in make():
                put(item)
                if is_closed.is_set():
                    return
        except BaseException as error:  # told to the one who waits
            end = _End(error)
        put(end)

    threading.Thread(target=work, name="resident-read-ahead", daemon=True).start()
    try:
        while True:
            try:
                item = ready.get(timeout=PATIENCE_S)
            except queue.Empty:
                yield None
                continue
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        is_closed.set()
