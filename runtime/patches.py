"""The registry of patches: changes to loaded code that are probed first, checked afterwards, and undone at the end.

A patch lives as long as an engine needs it, across graph runs. Whoever needs one takes a `Hold`; the first hold
applies it, the last one that closes reverts it.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

log = logging.getLogger(__name__)

Status = Literal["applied", "not needed", "refused", "not applied"]
Undo = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to a package.

    versions: first and last version that it is for, both included
    cures:    the fault, in a sentence
    is_faulty: a numeric probe: whether the fault is there now; used before, and after to verify
    apply:    makes the change and returns how to undo it
    """

    id: str
    package: str
    versions: tuple[str, str]
    cures: str
    is_faulty: Callable[[], bool]
    apply: Callable[[], Undo]


@dataclass(frozen=True, kw_only=True)
class PatchState:
    """A patch as the report and `doctor` show it: what became of it and why."""

    id: str
    status: Status
    why: str

    def __str__(self) -> str:
        return f"{self.id}: {self.status} ({self.why})"


class Hold:
    """One engine's need of a patch; closing it twice does nothing."""

    def __init__(self, state: PatchState, release: Callable[[], None]) -> None:
        self.state = state
        self._release: Callable[[], None] | None = release

    def close(self) -> None:
        release, self._release = self._release, None
        if release:
            release()


class Patches:
    """A table of patches and what became of each in this process."""

    def __init__(self, table: Iterable[Patch], *, version_of: Callable[[str], str] = metadata.version) -> None:
        self._table = {patch.id: patch for patch in table}
        self._version_of = version_of
        self._undo: dict[str, Undo] = {}
        self._states: dict[str, PatchState] = {}
        self._num_holds: dict[str, int] = {}
        self._lock = threading.RLock()

    def hold(self, patch_id: str) -> Hold:
        """Take part in a patch: it is applied if its fault is there. Never raises for a patch that does not work."""
        with self._lock:
            self._num_holds[patch_id] = self._num_holds.get(patch_id, 0) + 1
            if patch_id not in self._undo:
                self._states[patch_id] = state = self._try(self._table[patch_id])
                log.log(logging.WARNING if state.status == "refused" else logging.INFO, "patch %s", state)
            return Hold(self._states[patch_id], lambda: self._release(patch_id))

    def _try(self, patch: Patch) -> PatchState:
        try:
            if why := self._why_not_for(patch):
                return PatchState(id=patch.id, status="not needed", why=why)
            if not patch.is_faulty():
                return PatchState(id=patch.id, status="not needed", why="the probe finds no fault")
            undo = patch.apply()
        except Exception as error:
            return PatchState(id=patch.id, status="refused", why=f"{type(error).__name__}: {error}")
        try:
            why = "the fault is still there after it" if patch.is_faulty() else ""
        except Exception as error:
            why = f"its check raised {type(error).__name__}: {error}"
        if why:
            undo()
            return PatchState(id=patch.id, status="refused", why=why)
        self._undo[patch.id] = undo
        return PatchState(id=patch.id, status="applied", why=patch.cures)

    def _why_not_for(self, patch: Patch) -> str:
        try:
            version = self._version_of(patch.package)
        except metadata.PackageNotFoundError:
            return f"{patch.package} is not installed"
        first, last = patch.versions
        if not _numbers(first) <= _numbers(version) <= _numbers(last):
            return f"{patch.package} is {version}; it is for {first} to {last}"
        return ""

    def _release(self, patch_id: str) -> None:
        with self._lock:
            self._num_holds[patch_id] -= 1
            if self._num_holds[patch_id] or patch_id not in self._undo:
                return
            self._undo.pop(patch_id)()
            self._states.pop(patch_id)
            log.info("patch %s reverted: no engine needs it any more", patch_id)

    def states(self) -> list[PatchState]:
        """Every patch of the table: what became of it, or that no engine has needed it yet."""
        with self._lock:
            return [self._states.get(one.id) or self._unused(one) for one in self._table.values()]

    def _unused(self, patch: Patch) -> PatchState:
        if why := self._why_not_for(patch):
            return PatchState(id=patch.id, status="not needed", why=why)
        return PatchState(id=patch.id, status="not applied", why="no engine has needed it yet")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("0.3.2+cu121.torch2.4")
    (0, 3, 2)
    """
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


MODULES = ("exllamav2_sdpa",)
"""Modules under engines/ that hold a `PATCH` each."""

_registry: Patches | None = None
_registry_lock = threading.Lock()


def registry() -> Patches:
    """The process's patches."""
    global _registry
    with _registry_lock:
        if _registry is None:
            table = [importlib.import_module(f".engines.{name}", __package__).PATCH for name in MODULES]
            _registry = Patches(table)
        return _registry
