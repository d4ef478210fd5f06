"""When Free LLM Memory must run again."""

from __future__ import annotations


class FreeMark:
    """When models were last freed, in loads: a graph that is queued again unchanged frees only what was loaded since.

    The fingerprint is the load counter. Freeing keeps the fingerprint that the running prompt began with valid,
    so that the loads which the freeing has undone do not make the node run again.
    """

    def __init__(self) -> None:
        self._num_loads = self._offered = self._kept = 0

    def fingerprint(self, num_loads: int) -> int:
        self._offered = self._kept if num_loads == self._num_loads else num_loads
        return self._offered

    def freed(self, num_loads: int) -> None:
        self._num_loads, self._kept = num_loads, self._offered
