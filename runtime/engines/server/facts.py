"""What a server is and can do: asked, never assumed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import ModelNotFound, ServerError
from ..base import Encoded
from .http import Http

ServerKind = Literal["vllm", "llamacpp", "sglang", "ollama", "tabbyapi", "other"]

_OWNERS: dict[str, ServerKind] = {
    "vllm": "vllm",
    "llamacpp": "llamacpp",
    "sglang": "sglang",
    "library": "ollama",
    "tabbyapi": "tabbyapi",
}

_VERSION_PATHS = {"vllm": "/version", "ollama": "/api/version"}

SLEEP_S = 120.0
"""Patience for a server that moves its weights."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One entry of a server's list. root: the folder that the server loaded, if it tells."""

    name: str
    context_len: int | None = None
    root: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What one server told at one moment."""

    kind: ServerKind
    version: str | None
    models: tuple[ServedModel, ...]
    can_sleep: bool

    def find(self, name: str, address: str) -> ServedModel:
        """The served model of that name; the only one for an empty name. Raises ModelNotFound with names there are."""
        names = [model.name for model in self.models]
        if not name and len(names) == 1:
            return self.models[0]
        for model in self.models:
            if model.name in (name, f"{name}:latest"):
                return model
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        asked = f"does not serve {name!r}" if name else "serves several models, and none is chosen"
        raise ModelNotFound(f"The server {address} {asked}. It serves: {listed or 'nothing'}. Pick one of these.")


def ask_facts(http: Http) -> ServerFacts:
    """Ask a server what it is; raises ServerError where it does not answer as one."""
    reply = http.get("/v1/models")
    if not reply.is_ok or not isinstance(reply.body, dict):
        raise http.refusal(reply)
    entries = reply.body.get("data")
    if not isinstance(entries, list):
        raise ServerError(f"The server {http.profile.address} lists no models at /v1/models. Is it OpenAI-compatible?")
    entries = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    owners = {str(entry.get("owned_by")).lower() for entry in entries}
    kind: ServerKind = next((_OWNERS[owner] for owner in sorted(owners) if owner in _OWNERS), "other")
    return ServerFacts(
        kind=kind,
        version=_version(http, _VERSION_PATHS[kind]) if kind in _VERSION_PATHS else None,
        models=tuple(map(_model, entries)),
        can_sleep=kind == "vllm" and is_asleep(http) is not None,
    )


def _model(entry: dict[str, Any]) -> ServedModel:
    meta = entry.get("meta")
    told = entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    root = entry.get("root")
    return ServedModel(
        name=entry["id"],
        context_len=told if isinstance(told, int) else None,
        root=root if isinstance(root, str) and os.path.isdir(root) else None,
    )


def _version(http: Http, path: str) -> str | None:
    reply = http.get(path)
    version = reply.body.get("version") if isinstance(reply.body, dict) else None
    return version if isinstance(version, str) else None


def is_asleep(http: Http) -> bool | None:
    """Whether the server sleeps; None where it has no such endpoint."""
    reply = http.get("/is_sleeping")
    told = reply.body.get("is_sleeping") if reply.is_ok and isinstance(reply.body, dict) else None
    return told if isinstance(told, bool) else None


def sleep(http: Http) -> None:
    """Move the server's weights off the card; raises ServerError if it refuses."""
    _order(http, "/sleep?level=1")


def wake(http: Http) -> None:
    """Bring the server's weights back; raises ServerError if it refuses."""
    _order(http, "/wake_up")


def release_ollama(http: Http, model: str) -> None:
    """Have Ollama unload a model now; raises ServerError if it refuses."""
    _order(http, "/api/generate", {"model": model, "keep_alive": 0})


def check_tokenizer(http: Http, kind: str, model: str, encoded: Encoded) -> None:
    """Raise ServerError if the server makes other ids of the same text: its tokenizer is another one."""
    body: dict[str, Any] = {"add_special_tokens": False, "model": model, "prompt": encoded.text}
    if kind == "llamacpp":
        body = {"add_special": False, "parse_special": True, "content": encoded.text}
    reply = http.post("/tokenize", body)
    told = reply.body.get("tokens") if reply.is_ok and isinstance(reply.body, dict) else None
    if isinstance(told, list) and tuple(told) != encoded.token_ids:
        raise ServerError(
            f"The tokenizer of profile {http.profile.name!r} is not that of {model} on {http.profile.address}: the "
            "same text gives other ids. Put the served model's own folder into the profile."
        )


def _order(http: Http, path: str, body: object = None) -> None:
    reply = http.post(path, body or {}, timeout_s=SLEEP_S)
    if not reply.is_ok:
        raise http.refusal(reply)


_METRIC = re.compile(
    r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?[ \t]+([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?)[ \t]*$", re.MULTILINE
)


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus text to sums by whole name, labels added up; what is no finite number is left out.

    >>> read_metrics('vllm:num_requests_running{engine="0"} 2.0')
    {'vllm:num_requests_running': 2.0}
    """
    sums: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


_FIGURES: dict[str, tuple[str, ...]] = {
    "num_running": ("vllm:num_requests_running", "llamacpp:requests_processing", "sglang:num_running_reqs"),
    "num_waiting": ("vllm:num_requests_waiting", "llamacpp:requests_deferred", "sglang:num_queue_reqs"),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage"),
}


def figures(metrics: dict[str, float]) -> dict[str, float]:
    """What the monitor shows of a server, as far as it tells: requests that run and wait, and two fractions.

    kv_cache_usage:    of its KV cache
    prefix_cache_rate: prompt tokens found in its KV cache, of all since it started
    """
    found = {name: metrics[one] for name, spellings in _FIGURES.items() for one in spellings if one in metrics}
    hits, all_tokens = metrics.get("vllm:prefix_cache_hits_total"), metrics.get("vllm:prefix_cache_queries_total")
    if "llamacpp:prompt_tokens_cached_total" in metrics:
        hits = metrics["llamacpp:prompt_tokens_cached_total"]
        all_tokens = hits + metrics.get("llamacpp:prompt_tokens_total", 0.0)
    if hits is not None and all_tokens:
        found["prefix_cache_rate"] = hits / all_tokens
    return found


def num_busy(metrics: dict[str, float]) -> float | None:
    """Requests that run or wait; None where the server does not tell."""
    told = figures(metrics)
    return told["num_running"] + told.get("num_waiting", 0.0) if "num_running" in told else None
