"""The models that lie in ComfyUI's LLM folders: names for a menu, and what they stand for.

A name never becomes a path by arithmetic: it is looked up among what a scan has found, so a workflow from a stranger
reaches nothing else, while links that the user made inside the folders work.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

MAX_DEPTH = 4
"""Levels below a root that are searched: LLM/owner/model/quant/file."""

LATER_SHARD = re.compile(r"-(?!0*1-of-)\d+-of-\d+\.gguf$", re.IGNORECASE)
MODEL_FILES = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What one scan found.

    models:  name -> path, sorted by name; names are relative to their root, with forward slashes
    folders: names of folders that hold no model themselves
    seen:    every folder looked into -> its modification time
    """

    models: dict[str, str] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    seen: dict[str, int] = field(default_factory=dict)

    def is_fresh(self) -> bool:
        """Nothing was added or removed since the scan."""
        return bool(self.seen) and all(_mtime(folder) == mtime for folder, mtime in self.seen.items())


def scan(roots: Sequence[str]) -> Listing:
    """Everything below the roots that looks like a model: folders with a config or weights, and GGUF files.

    Of two that have the same name the one in the earlier root counts.
    """
    models: dict[str, str] = {}
    folders: set[str] = set()
    seen: dict[str, int] = {}
    for root in roots:
        seen[root] = _mtime(root)
        for name, folder, files in _walk(root, "", 0):
            seen[folder] = _mtime(folder)
            is_model = "config.json" in files or any(file.endswith(".safetensors") for file in files)
            if name and is_model:
                models.setdefault(name, folder)
            elif name:
                folders.add(name)
            for file in files:
                if _is_gguf_model(file):
                    models.setdefault(f"{name}/{file}" if name else file, os.path.join(folder, file))
    return Listing(models=dict(sorted(models.items())), folders=frozenset(folders), seen=seen)


def _is_gguf_model(file: str) -> bool:
    """A GGUF file that can be loaded by itself: no later shard, no image projector."""
    lower = file.lower()
    return lower.endswith(".gguf") and not lower.startswith("mmproj") and not LATER_SHARD.search(file)


def _walk(folder: str, name: str, depth: int) -> Iterator[tuple[str, str, list[str]]]:
    """(name, folder, its files) from `folder` down; hidden folders are left out."""
    files: list[str] = []
    below: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (below if os.path.isdir(entry.path) else files).append(entry.name)
    except OSError as error:
        log.debug("cannot look into %s: %s", folder, error)
        return
    yield name, folder, files
    if depth < MAX_DEPTH:
        for one in sorted(below):
            yield from _walk(os.path.join(folder, one), f"{name}/{one}" if name else one, depth + 1)


def _mtime(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


_latest: dict[tuple[str, ...], Listing] = {}


def listing(roots: Sequence[str]) -> Listing:
    """The models below the roots, scanned again only after a folder has changed."""
    key = tuple(roots)
    known = _latest.get(key)
    if known is None or not known.is_fresh():
        known = _latest[key] = scan(roots)
    return known


def revision(path: str) -> str:
    """A short mark of the files' names, sizes and times: another mark is another model.

    A link to a file that is gone counts by its name: the engine tells in a sentence what is missing.
    """
    digest = hashlib.sha256()
    folder, names = (path, sorted(os.listdir(path))) if os.path.isdir(path) else os.path.split(path)
    for name in [names] if isinstance(names, str) else names:
        if name.endswith(MODEL_FILES):
            file = os.path.join(folder, name)
            size = os.path.getsize(file) if os.path.exists(file) else 0
            digest.update(os.fsencode(name) + f"\0{size}\0{_mtime(file)}\0".encode())
    return digest.hexdigest()[:16]
