"""Named server entries, kept on the machine that runs the graph: a graph holds a profile's name, never its key.

The file is JSON, mode 0600: {"profiles": {NAME: {"base_url": ..., "key_env": ..., ...}}}. Keys are resolved at call
time. Without any file the built-in profiles reach servers on this machine, without a key.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import ServerError
from .shell import for_shell

FILE_NAME = "profiles.json"
PATH_VARIABLE = "RESIDENT_LLM_PROFILES"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
_LOCAL = re.compile(r"(localhost|127\.0\.0\.1):([0-9]{1,5})")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
SECRET = ("key", "headers")
"""Entries whose value no message may show."""

_FORBIDDEN_HEADERS = ("host", "content-length", "transfer-encoding", "connection")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How to reach one server.

    base_url:       http(s)://host:port, with or without a trailing /v1
    key_env, key:   the environment variable that holds the key, or the key itself; never shown
    models:         the only models that a graph may ask for; empty is all
    headers:        further request headers, as pairs; never shown
    tokenizer:      folder or GGUF file with the served model's tokenizer and chat template, for prompts sent as ids
    uses_chat:      let the server build prompts by its chat endpoint, even where it takes ids
    proxy_from_env: use HTTP_PROXY and its kin
    max_concurrent: requests in flight at once
    pool:           names of further profiles that serve the same model; a list is spread over all of them
    gpu_bytes:      what the server holds of this machine's GPU; known after its first sleep where it is left out
    """

    name: str
    base_url: str
    key_env: str | None = None
    key: str | None = field(default=None, repr=False)
    models: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    tokenizer: str | None = None
    uses_chat: bool = False
    proxy_from_env: bool = False
    max_concurrent: int = 16
    connect_s: float = 10.0
    first_token_s: float = 600.0
    between_tokens_s: float = 60.0
    pool: tuple[str, ...] = ()
    gpu_bytes: int = 0

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"Profile {self.name!r} needs a base_url such as http://127.0.0.1:8000.")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ServerError(
                f"The base_url of profile {self.name!r} holds a user, a query or a fragment; put a key into key_env."
            )
        if not _NAME.fullmatch(self.name):
            raise ServerError(f"{self.name!r} is no profile name; use letters, digits, dots, dashes, up to 64.")
        if self.key is not None and self.key_env is not None:
            raise ServerError(f"Profile {self.name!r} has both key and key_env; keep one.")
        if self.max_concurrent < 1 or self.gpu_bytes < 0:
            raise ServerError(
                f"Profile {self.name!r} needs max_concurrent of at least 1 and gpu_bytes of at least 0; they are "
                f"{self.max_concurrent} and {self.gpu_bytes}."
            )
        for name in ("connect_s", "first_token_s", "between_tokens_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ServerError(
                    f"Profile {self.name!r} has {name} {getattr(self, name)}; it is a number of seconds above 0."
                )
        for header, value in self.headers:
            if header.lower() in _FORBIDDEN_HEADERS or any(c in header + value for c in "\r\n\0"):
                raise ServerError(f"Profile {self.name!r} may not set the header {header!r}.")

    @property
    def root_url(self) -> str:
        """The base URL without a trailing slash or /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def address(self) -> str:
        """Host and port, for messages."""
        return urlsplit(self.base_url).netloc

    @property
    def is_loopback(self) -> bool:
        """Whether the server runs on this machine."""
        return urlsplit(self.base_url).hostname in _LOOPBACK

    def resolve_key(self) -> str | None:
        """The key, from where the profile says; raises ServerError if its variable is not set."""
        if self.key_env is None:
            return self.key
        key = os.environ.get(self.key_env)
        if not key:
            raise ServerError(
                f"Profile {self.name!r} takes its key from the environment variable {self.key_env}, which is not set. "
                "Set it where ComfyUI is started."
            )
        return key

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models


BUILT_IN: tuple[Profile, ...] = (
    Profile(name="local-vllm", base_url="http://127.0.0.1:8000"),
    Profile(name="local-llamacpp", base_url="http://127.0.0.1:8080"),
    Profile(name="local-ollama", base_url="http://127.0.0.1:11434"),
    Profile(name="local-lmstudio", base_url="http://127.0.0.1:1234"),
    Profile(name="local-tabby", base_url="http://127.0.0.1:5000"),
    Profile(name="local-sglang", base_url="http://127.0.0.1:30000"),
)
"""Servers on this machine at their usual ports."""

_host_path: Path | None = None


def use(path: Path) -> None:
    """Keep the profiles in this file; the host calls it, as it knows its user folder."""
    global _host_path
    _host_path = path


def default_path() -> Path:
    """Where the profiles lie: by the environment, the host, the host's folder around this pack, or in the home."""
    if named := os.environ.get(PATH_VARIABLE):
        return Path(named)
    if _host_path is not None:
        return _host_path
    pack = Path(__file__).resolve().parent.parent
    if pack.parent.name == "custom_nodes":
        return pack.parent.parent / "user" / "__resident_llm" / FILE_NAME
    return Path.home() / ".config" / "resident-llm" / FILE_NAME


def read(path: Path | None = None) -> dict[str, Profile]:
    """All profiles by name, the built-in ones included; raises ServerError with what is wrong in the file."""
    found = {profile.name: profile for profile in BUILT_IN}
    path = path or default_path()
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no plain file")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return found
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"The profile file {path} cannot be read: {error}. Mend it, or move it away.") from None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is no JSON ({error})") from None
    entries = whole.get("profiles") if isinstance(whole, dict) else None
    if not isinstance(entries, dict):
        raise _damaged(path, 'it must be {"profiles": {NAME: {"base_url": ...}}}')
    try:
        return found | {name: _profile(name, entry) for name, entry in entries.items()}
    except ServerError as error:
        raise _damaged(path, str(error).rstrip(".")) from None


def _damaged(path: Path, fault: str) -> ServerError:
    return ServerError(
        f"The profile file {path} cannot be read: {fault}. Mend it, or move it away and write it anew with: "
        f"{for_shell('python -m runtime profiles add')}"
    )


KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "str": ("a text", lambda one: isinstance(one, str)),
    "str | None": ("a text", lambda one: isinstance(one, str)),
    "bool": ("true or false", lambda one: isinstance(one, bool)),
    "int": ("a whole number", lambda one: isinstance(one, int) and not isinstance(one, bool)),
    "float": ("a number", lambda one: isinstance(one, (int, float)) and not isinstance(one, bool)),
    "tuple[str, ...]": ("a list of texts", lambda one: isinstance(one, list) and _are_texts(one)),
    "tuple[tuple[str, str], ...]": (
        "an object of texts",
        lambda one: isinstance(one, dict) and _are_texts(one.values()),
    ),
}
"""The type of a field as it is written in Profile -> what its entry in the file must be, in words and as a check."""


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(one, str) for one in values)


def _profile(name: str, entry: object) -> Profile:
    """The profile of one entry; raises ServerError that names what is missing, unknown or of a wrong kind in it."""
    known = {one.name: str(one.type) for one in fields(Profile) if one.name != "name"}
    if not isinstance(entry, dict) or "base_url" not in entry:
        raise ServerError(f'Profile {name!r} must be an object with a base_url, such as {{"base_url": "http://..."}}.')
    if unknown := sorted(set(entry) - set(known)):
        raise ServerError(
            f"Profile {name!r} holds the unknown entry {unknown[0]!r}; entries are {', '.join(sorted(known))}."
        )
    values: dict[str, Any] = {key: value for key, value in entry.items() if value is not None}
    for key, value in values.items():
        what, is_right = KINDS[known[key]]
        if not is_right(value):
            shown = "" if key in SECRET else f", and is {value!r}"
            raise ServerError(f"Profile {name!r}: {key} must be {what}{shown}.")
        if isinstance(value, (dict, list)):
            values[key] = tuple(sorted(value.items()) if isinstance(value, dict) else value)
    return Profile(name=name, **values)


def find(name: str) -> Profile:
    """The profile of that name, or one for "localhost:PORT"; raises ServerError with the names there are."""
    profiles = read()
    if name in profiles:
        return profiles[name]
    if (local := _LOCAL.fullmatch(name)) and 0 < int(local[2]) < 65536:
        return Profile(name=name, base_url=f"http://127.0.0.1:{local[2]}")
    raise ServerError(
        f"There is no server profile {name!r}. Profiles are: {', '.join(profiles)}. "
        f"Add one with: {for_shell('python -m runtime profiles add NAME --url http://host:port')}"
    )


def split_model(model: str) -> tuple[str, str]:
    """A spec's model as (profile name, model name); the model's own name may hold slashes.

    >>> split_model("gpu-box/Qwen/Qwen3-32B")
    ('gpu-box', 'Qwen/Qwen3-32B')
    """
    profile, _, name = model.partition("/")
    return profile, name


def write(profile: Profile, path: Path | None = None) -> Path:
    """Add or replace one profile; the file is readable by its owner only. Returns the file's path."""
    path = path or default_path()
    stored = {name: one for name, one in read(path).items() if one not in BUILT_IN}
    stored[profile.name] = profile
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".profiles-")
    try:
        os.chmod(temporary, stat.S_IRUSR | stat.S_IWUSR)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"profiles": {name: _entry(one) for name, one in stored.items()}}, file, indent=2)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return path


def _entry(profile: Profile) -> dict[str, object]:
    """Only what differs from the defaults."""
    plain = replace(profile, headers=())
    default = asdict(Profile(name="x", base_url="http://x"))
    entry = {k: v for k, v in asdict(plain).items() if k != "name" and v != default[k]} | {"base_url": profile.base_url}
    return entry | ({"headers": dict(profile.headers)} if profile.headers else {})
