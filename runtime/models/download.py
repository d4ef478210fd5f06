"""A repository of the hub -> a model folder: what is needed and nothing else, whole or not there at all."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import re
import shutil
from collections.abc import Generator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ModelLoadFailed, ModelNotFound, ModelUnsupported, ResidentError
from ..events import LoadProgress
from ..telemetry import format_bytes
from . import hub
from .hub import HubFile, HubRepo
from .read_ahead import read_ahead

FACTS_FILE = "resident_download.json"
PARTIAL = ".resident_download"
"""The hidden folder in which a download grows; hidden folders are never listed as models."""

SPARE_BYTES = 1_000_000_000
SMALL = (".json", ".jinja", ".txt")
SHARD = re.compile(r"-\d+-of-\d+(?=\.gguf$)")


def wanted(repo: HubRepo, only: str | None = None) -> tuple[HubFile, ...]:
    """The files to fetch: safetensors or GGUF, and the small text files beside them; never code, never pickles.

    only: a pattern for the weights' names, such as "*Q4_K_M*". Raises ModelUnsupported where nothing can be read,
    or where the repository holds several models to choose from.
    """
    files = [one for one in repo.files if _is_safe(one.name)]
    weights = [one for one in files if one.name.endswith((".safetensors", ".gguf"))]
    if only:
        weights = [one for one in weights if fnmatch.fnmatch(one.name.rpartition("/")[2], only)]
    flat = [one for one in weights if one.name.endswith(".safetensors") and "/" not in one.name]
    sharded = [one for one in flat if not one.name.startswith("consolidated")]
    chosen = sharded or flat or [one for one in weights if one.name.endswith(".gguf")]
    if not chosen:
        what = f"no safetensors or GGUF file like {only!r}" if only else "neither safetensors nor GGUF files"
        raise ModelUnsupported(f"{repo.repo} holds {what}. Look for a repository in one of these formats.")
    models = sorted({SHARD.sub("", one.name) for one in chosen if one.name.endswith(".gguf")})
    if len(models) > 1:
        raise ModelUnsupported(
            f"{repo.repo} holds {len(models)} GGUF models: {', '.join(models[:12])}{' ...' if models[12:] else ''}. "
            'Choose one with --only, such as --only "*Q4_K_M*".'
        )
    if models:  # a GGUF file holds its own config, tokenizer and template
        return tuple(chosen)
    small = [
        one for one in files if "/" not in one.name and (one.name.endswith(SMALL) or one.name == "tokenizer.model")
    ]
    return (*small, *chosen)


def _is_safe(name: str) -> bool:
    """A name that stays within its folder, on every system."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and not set(name) & set('\\:*?"<>|\0')


def recorded(folder: Path) -> dict[str, Any] | None:
    """What a downloaded folder's own record says: repo, revision, requested, only; None for any other folder."""
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def target_folder(repo: str, into: Path) -> Path:
    """Where the model is, or would be."""
    return into / repo.rpartition("/")[2]


def is_there(repo: str, into: Path, *, revision: str | None = None, only: str | None = None) -> bool:
    """Whether exactly this was downloaded before; raises ResidentError if something else stands in its place."""
    folder = target_folder(repo, into)
    if not folder.exists():
        return False
    facts = recorded(folder)
    if facts is None or str(facts["repo"]).lower() != repo.lower():
        raise ResidentError(
            f"{folder} is there already, and is not a download of {repo}. Choose another place with --into, or move "
            "that folder away."
        )
    sha = str(facts["revision"])
    if (revision is not None and not (revision == facts["requested"] or sha.startswith(revision))) or (
        only is not None and only != facts["only"]
    ):
        raise ResidentError(
            f"{folder} holds {repo} at revision {sha[:12]}{' and ' + facts['only'] if facts['only'] else ''}. Choose "
            "another place with --into, or move that folder away."
        )
    return True


def download(
    repo: str, into: Path, *, revision: str | None = None, only: str | None = None
) -> Generator[LoadProgress, None, Path]:
    """Yield progress in bytes, at least four times a second; return the model's folder, at once if it is there.

    Closing it keeps what has come: the next call goes on from there. The folder gets its name when every file is
    whole, so that half a model is never listed. Raises a sentence for every fault.
    """
    try:
        return (yield from _download(repo, into, revision, only))
    except OSError as error:
        raise ModelLoadFailed(
            f"{error.filename or into} cannot be written: {error.strerror or error}. Free some disk space, or choose "
            "another folder with --into; what is there is kept."
        ) from error


def _download(repo: str, into: Path, revision: str | None, only: str | None) -> Generator[LoadProgress, None, Path]:
    if is_there(repo, into, revision=revision, only=only):
        return target_folder(repo, into)
    found: HubRepo | None = None
    with closing(read_ahead(lambda: iter([hub.find(repo, revision)]))) as asking:
        for answer in asking:
            found = answer or found
            yield LoadProgress(done=0, total=0, what=f"asking for {repo}")
    if found is None:
        raise ModelNotFound(f"Nothing came for {repo}. Try again.")
    files = wanted(found, only)
    partial = into / PARTIAL / f"{target_folder(repo, into).name}-{found.revision[:16]}"
    total = sum(one.num_bytes for one in files)
    check_disk(found, files, partial, into)
    partial.mkdir(parents=True, exist_ok=True)
    done = 0
    for file in files:
        with closing(_fetch(found, file, partial)) as fetching:
            for num_bytes in fetching:
                yield LoadProgress(done=done + num_bytes, total=total, what=file.name)
        done += file.num_bytes
    facts = {"repo": found.repo, "revision": found.revision, "requested": revision, "only": only}
    named = {one.name: {"bytes": one.num_bytes, "sha256": one.sha256} for one in files}
    (partial / FACTS_FILE).write_text(json.dumps({**facts, "files": named}, indent=1), encoding="utf-8")
    target = target_folder(repo, into)
    partial.replace(target)
    with contextlib.suppress(OSError):  # another download may be under way in it
        partial.parent.rmdir()
    return target


def check_disk(repo: HubRepo, files: tuple[HubFile, ...], partial: Path, into: Path) -> None:
    """Raise ResidentError with the numbers if the rest of the download does not fit."""
    there = next(folder for folder in (into, *into.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    have = sum(part.stat().st_size for part in partial.rglob("*") if part.is_file()) if partial.is_dir() else 0
    rest = sum(one.num_bytes for one in files) - have
    if rest + SPARE_BYTES > free:
        raise ResidentError(
            f"{repo.repo} needs {format_bytes(rest)} more and {format_bytes(SPARE_BYTES)} to spare, but {there} has "
            f"{format_bytes(free)} free. Free some, or choose another disk with --into."
        )


def _fetch(repo: HubRepo, file: HubFile, partial: Path) -> Generator[int, None, None]:
    """Bytes of this file that are there; goes on from what an earlier call left, and proves the whole."""
    path = partial / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, have = hashlib.sha256(), 0
    if path.exists():
        with path.open("rb") as before:
            while data := before.read(hub.CHUNK_BYTES):
                digest.update(data)
                have += len(data)
                yield have
    if have > file.num_bytes:
        path.unlink()
        digest, have = hashlib.sha256(), 0
    if have < file.num_bytes or not path.exists():
        try:
            with path.open("ab") as out, closing(read_ahead(lambda: hub.read(repo, file, have))) as reading:
                for part in reading:
                    if part is not None:
                        out.write(part)
                        digest.update(part)
                        have += len(part)
                    yield have
        except OSError as error:
            raise ModelLoadFailed(f"{path} cannot be written: {error}. Free some disk space and try again.") from error
    if have < file.num_bytes:
        raise ResidentError(
            f"The connection ended in {file.name} of {repo.repo} after {format_bytes(have)} of "
            f"{format_bytes(file.num_bytes)}. Run the same again: it goes on where it stopped."
        )
    if have > file.num_bytes or file.sha256 not in (None, digest.hexdigest()):
        path.unlink()
        raise ModelLoadFailed(
            f"{file.name} of {repo.repo} came damaged: its hash or size is not what the hub says. Run the same again "
            "to fetch it anew."
        )
