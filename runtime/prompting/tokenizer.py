"""A model's tokenizer, chat templates and end tokens, read from its folder or GGUF file; no weights, no remote code."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadFailed, ModelNotFound, ModelUnsupported
from ..models.gguf_header import read_gguf
from ..models.info import text_config
from ..shell import for_shell

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What transformers hands to templates by name."""

MAX_IDS = 2**32
"""A tokenizer counts its ids in 32 bits."""

GGUF_TOKENS, GGUF_KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in a GGUF file that are structure; all others are text."""

GGUF_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_READ = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "generation_config.json",
    "config.json",
)


@dataclass(frozen=True, kw_only=True)
class ModelTokenizer:
    """What a model's files say about text.

    special_tokens: named tokens as text: bos_token, eos_token ...
    templates:      chat templates by name; the main one is "default"
    end_ids:        ids that end an answer, with the files that say so
    vocab_size:     highest id + 1
    """

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    templates: dict[str, str]
    end_ids: dict[int, list[str]] = field(default_factory=dict)
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        highest = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        object.__setattr__(self, "vocab_size", highest + 1)


class TokenizerCache:
    """The tokenizers read last, by path and the state of the files: a changed file is read again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[object, ModelTokenizer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> ModelTokenizer:
        key = (str(path.resolve()), tuple(_state(path)))
        with self._lock:
            if key not in self._entries:
                self._entries[key] = read_tokenizer(path)
                while len(self._entries) > self._size:
                    self._entries.popitem(last=False)
            self._entries.move_to_end(key)
            return self._entries[key]


def _state(path: Path) -> Iterator[tuple[str, int, int]]:
    files = [path] if path.is_file() else [path / name for name in _READ] + sorted(path.glob("chat_templates/*.jinja"))
    for file in files:
        if file.is_file():
            stat = file.stat()
            yield file.name, stat.st_mtime_ns, stat.st_size


def read_tokenizer(path: Path) -> ModelTokenizer:
    """Read a model folder or a GGUF file; raises ModelNotFound, ModelLoadFailed, ModelUnsupported."""
    if path.is_file():
        return _from_transformers(path.parent, {}, gguf_file=path.name)
    if not path.is_dir():
        raise ModelNotFound(f"There is no model at {path}. Pick another one in the loader.")
    config = _json(path / "tokenizer_config.json")
    if not (path / "tokenizer.json").is_file():
        return _from_transformers(path, _templates(path, config))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadFailed(f"{path / 'tokenizer.json'} cannot be read: {error}. Fetch the file again.") from error
    named = _named_tokens(_json(path / "special_tokens_map.json")) | _named_tokens(config)
    _add_configured(tokenizer, config, named)
    end_ids = _end_ids(path)
    _note_eos(end_ids, tokenizer, named)
    return ModelTokenizer(
        tokenizer=_bare(tokenizer), special_tokens=named, templates=_templates(path, config), end_ids=end_ids
    )


def read_vocabulary(file: Path) -> ModelTokenizer:
    """What a GGUF file's header says about text: its tokens, its template and what ends an answer.

    It takes no time and no transformers, and is enough to render a prompt and to name tokens. Ids of text are not to
    be had from it: how text is cut into tokens is what building the real tokenizer takes seconds for.
    """
    from tokenizers import AddedToken, Tokenizer, models

    metadata, _ = read_gguf(file, whole=(GGUF_TOKENS, GGUF_KINDS))
    tokens, kinds = metadata.get(GGUF_TOKENS), metadata.get(GGUF_KINDS) or []
    if not isinstance(tokens, list):
        raise ModelLoadFailed(f"{file.name} holds no tokenizer. Get the model's GGUF from another source.")
    tokenizer = Tokenizer(models.BPE(vocab={token: one for one, token in enumerate(tokens)}, merges=[]))
    for token, kind in zip(tokens, kinds):
        if token and kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in GGUF_NAMED.items()}
    named = {name: tokens[one] for name, one in ids.items() if isinstance(one, int) and one < len(tokens)}
    end_ids: dict[int, list[str]] = {}
    _note_eos(end_ids, tokenizer, named)
    templates = _named_templates(metadata.get("tokenizer.chat_template"))
    return ModelTokenizer(tokenizer=tokenizer, special_tokens=named, templates=templates, end_ids=end_ids)


def _bare(tokenizer: Tokenizer) -> Tokenizer:
    """Without the truncation and padding that some files carry from training."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _note_eos(end_ids: dict[int, list[str]], tokenizer: Tokenizer, named: Mapping[str, str]) -> None:
    eos = tokenizer.token_to_id(named.get("eos_token", ""))
    if eos is not None:
        end_ids.setdefault(eos, []).append("tokenizer eos_token")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadFailed(f"{path} is not JSON: {error}. Fetch the file again.") from error
    return content if isinstance(content, dict) else {}


def _content(token: object) -> str | None:
    """A token as configs write it: a string, or a dict with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in NAMED_TOKENS}
    return {name: token for name, token in found.items() if token is not None}


def _add_configured(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json has beyond tokenizer.json, or with other flags, in their order."""
    from tokenizers import AddedToken

    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        old = known.get(token["content"])
        if old is None or any(getattr(old, flag) != token.get(flag, False) for flag in flags):
            known[token["content"]] = AddedToken(token["content"], **{flag: token.get(flag, False) for flag in flags})
            tokenizer.add_tokens([known[token["content"]]])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = [_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    for content in [*named.values(), *(token for token in more if token)]:
        if content not in known:
            known[content] = AddedToken(content, special=True, normalized=False)
            tokenizer.add_tokens([known[content]])


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder, from the place that counts most: a .jinja file, then the configs."""
    files = {file.stem: file for file in sorted(path.glob("chat_templates/*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    for source in (config, _json(path / "chat_template.json"), _json(path / "processor_config.json")):
        if found := _named_templates(source.get("chat_template")):
            return found
    return {}


def _named_templates(value: object) -> dict[str, str]:
    """One template, a list of named ones, or a dict of them."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    return {str(name): str(text) for name, text in value.items()} if isinstance(value, dict) else {}


def _end_ids(path: Path) -> dict[int, list[str]]:
    """The end ids that the configs give, with their sources."""
    found: dict[int, list[str]] = {}
    for name in ("generation_config.json", "config.json"):
        config = _json(path / name)
        value = config.get("eos_token_id", text_config(config).get("eos_token_id"))
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int) and 0 <= one < MAX_IDS:  # some configs write -1 for none
                found.setdefault(one, []).append(name)
    return found


def _from_transformers(folder: Path, templates: dict[str, str], **where: str) -> ModelTokenizer:
    """For GGUF files and folders without tokenizer.json: transformers builds the fast tokenizer (slow: seconds)."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelUnsupported(
            f"{folder} has no tokenizer.json, and transformers, which could convert its tokenizer, is not installed. "
            f"Try: {for_shell('pip install transformers')}"
        ) from error
    try:
        wrapped = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **where)
    except Exception as error:  # a foreign loader on a foreign file
        raise ModelLoadFailed(
            f"The tokenizer of {folder / where.get('gguf_file', '')} cannot be read: "
            f"{' '.join(str(error).split())} Fetch the model again."
        ) from error
    tokenizer = getattr(wrapped, "backend_tokenizer", None)
    if tokenizer is None:
        raise ModelUnsupported(
            f"{folder} has only a slow tokenizer ({type(wrapped).__name__}). Get a build of the model with a "
            "tokenizer.json."
        )
    named = _named_tokens(wrapped.special_tokens_map)
    end_ids = {} if where else _end_ids(folder)
    _note_eos(end_ids, tokenizer, named)
    templates = templates or _named_templates(wrapped.chat_template)
    return ModelTokenizer(tokenizer=_bare(tokenizer), special_tokens=named, templates=templates, end_ids=end_ids)
