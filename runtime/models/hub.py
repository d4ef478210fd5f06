"""The hub, through `huggingface_hub`: what a repository holds, and the bytes of a file. Endpoint, token and offline
mode are the library's own (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE)."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ..errors import EngineUnavailable, ModelNotFound, ResidentError
from ..shell import for_shell

TIMEOUT_S = 20
CHUNK_BYTES = 1 << 20
REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a repository. sha256 is None for small files, which the hub keeps in git."""

    name: str
    num_bytes: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class HubRepo:
    """A repository at one commit."""

    repo: str
    revision: str
    files: tuple[HubFile, ...]


def check_name(repo: str) -> None:
    """Raise ModelNotFound for what cannot be the name of a repository."""
    if not REPO.fullmatch(repo) or ".." in repo:
        raise ModelNotFound(f"{repo!r} is no repository. Write OWNER/NAME, such as Qwen/Qwen3-4B.")


def _hub() -> Any:
    """The library, found when it is needed; its errors are under `utils` in every version."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.utils
    except ImportError as error:
        raise EngineUnavailable(
            "Downloading needs the package huggingface_hub, which ComfyUI brings: use ComfyUI's Python, or run: "
            + for_shell("pip install huggingface_hub")
        ) from error
    return huggingface_hub


def find(repo: str, revision: str | None = None) -> HubRepo:
    """What the repository holds, with sizes; every fault is one sentence."""
    check_name(repo)
    hub = _hub()
    where = hub.constants.ENDPOINT
    if hub.constants.HF_HUB_OFFLINE:
        raise ResidentError(f"{repo} cannot be downloaded: HF_HUB_OFFLINE is set. Unset it and try again.")
    try:
        info = hub.HfApi(endpoint=where).model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except hub.utils.GatedRepoError as error:
        raise ModelNotFound(
            f"{repo} is gated: accept its licence at {where}/{repo}, then set HF_TOKEN to a token of your account."
        ) from error
    except hub.utils.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} has no revision {revision!r}. Leave --revision out for the newest.") from error
    except hub.utils.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{where} has no model {repo}, or it is private. Check the name; for a private one set HF_TOKEN."
        ) from error
    except Exception as error:  # the library's transport differs from version to version
        raise ResidentError(
            f"{where} does not answer ({_cause(error)}). Check the network, or set HF_ENDPOINT to a mirror."
        ) from error
    files = tuple(
        HubFile(name=one.rfilename, num_bytes=one.size or 0, sha256=_sha256(one.lfs)) for one in info.siblings or ()
    )
    return HubRepo(repo=info.id or repo, revision=info.sha, files=files)


def _sha256(lfs: Any) -> str | None:
    """The hash of a large file; the library's type for it was a dict once."""
    found = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return str(found) if found else None


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"[:200]


def read(repo: HubRepo, file: HubFile, start: int = 0) -> Iterator[bytes]:
    """The file's bytes from `start` on, as they come; raises ResidentError for a broken connection."""
    hub = _hub()
    where = hub.constants.ENDPOINT
    url = f"{where}/{repo.repo}/resolve/{repo.revision}/{urllib.parse.quote(file.name)}"
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    for name, value in hub.utils.build_hf_headers().items():
        request.add_unredirected_header(name, value)  # a token must not reach the host that stores the bytes
    try:
        with closing(urllib.request.urlopen(request, timeout=TIMEOUT_S)) as response:
            if start and response.status != 206:
                yield from _skip(response, start)
            while data := response.read1(CHUNK_BYTES):
                yield data
    except urllib.error.HTTPError as error:
        raise ResidentError(
            f"{where} answered {error.code} for {file.name} of {repo.repo}. Try again: what is there is kept."
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ResidentError(
            f"The connection broke in {file.name} of {repo.repo} ({_cause(error)}). Run the same again: it goes on "
            "where it stopped."
        ) from error


def _skip(response: Any, num_bytes: int) -> Iterator[bytes]:
    """What follows the first bytes, from a server that sends a file only from its beginning."""
    while num_bytes:
        data = response.read1(CHUNK_BYTES)
        if not data:
            return
        if len(data) > num_bytes:
            yield data[num_bytes:]
            return
        num_bytes -= len(data)
