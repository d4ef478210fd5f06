"""From a model folder to ExLlamaV2's loaded parts: which weights, which cache, how many bytes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import EngineUnavailable, ModelLoadFailed, ModelUnsupported, OutOfMemory
from ..events import LoadProgress
from ..models.exllamav2_config import ELSEWHERE, check_supported, flat_rope
from ..models.info import read_config
from ..models.repack import repack
from ..models.safetensors_header import read_headers
from ..request import ModelSpec
from ..telemetry import Bytes, format_bytes
from .exllamav2_attention import PAGE, SDPA, Attention, choose, chunk_len, probe_causality, without_flash
from .exllamav2_sdk import Sdk, host_stream_kept, translate_errors

log = logging.getLogger(__name__)

CACHES = {"fp16": "ExLlamaV2Cache", "q8": "ExLlamaV2Cache_Q8", "q6": "ExLlamaV2Cache_Q6", "q4": "ExLlamaV2Cache_Q4"}
CACHE_BITS = {"fp16": (16.0, 16.0), "q8": (8.5, 8.5), "q6": (8.5, 4.5), "q4": (4.5, 4.5)}
"""Bits of one key and one value element; quantised ones share an fp16 scale among 32."""

MAX_DRAFT_TOKENS = 7
"""The SDK's logits buffer has 8 rows a request: the drafted ones and one more."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is going to be loaded, known from config and headers before any of it is.

    cache_len:   tokens that the KV cache holds: context and drafted tokens, in whole pages
    needs_repack: an AWQ folder, which becomes another one first
    """

    folder: Path
    config: Mapping[str, object]
    context_len: int
    cache_len: int
    kv_cache: str
    needs_repack: bool
    weights_bytes: int
    kv_bytes: int


def plan(spec: ModelSpec) -> Plan:
    """Read config and headers; raises ModelUnsupported with the engine that would run the model."""
    folder = Path(spec.model).expanduser()
    config = read_config(folder)
    method = check_supported(config)
    flat = flat_rope(config)
    context_len = spec.context_len or _number(flat, "max_position_embeddings", 2048)
    cache_len = -(-(context_len + num_draft_tokens(spec)) // PAGE) * PAGE
    kv_cache = "fp16" if spec.kv_cache == "auto" else spec.kv_cache
    if kv_cache not in CACHES:
        raise ModelUnsupported(f"ExLlamaV2 has no KV cache {kv_cache!r}. Set kv_cache to {', '.join(CACHES)}.")
    head_dim = _head_dim(flat)
    if kv_cache != "fp16" and head_dim % 32:
        raise ModelUnsupported(
            f"Heads of {head_dim} cannot be cached in {kv_cache}, which needs 32s. Use kv_cache fp16."
        )
    headers = read_headers(folder)
    return Plan(
        folder=folder,
        config=flat,
        context_len=context_len,
        cache_len=cache_len,
        kv_cache=kv_cache,
        needs_repack=method in ("awq", "compressed-tensors"),
        weights_bytes=sum(one.end - one.start for name, one in headers.items() if "embed_tokens" not in name)
        + (_embedding_bytes(headers) if flat.get("tie_word_embeddings") else 0),
        kv_bytes=kv_cache_bytes(flat, kv_cache, cache_len),
    )


def settle(spec: ModelSpec) -> ModelSpec:
    """The spec with context, cache and device as they come out here; a type of weights is not chosen."""
    made = plan(spec)
    return replace(
        spec, device=resolve_device(spec.device), dtype="auto", kv_cache=made.kv_cache, context_len=made.context_len
    )


def _embedding_bytes(headers: Mapping[str, Any]) -> int:
    return sum(one.end - one.start for name, one in headers.items() if "embed_tokens" in name)


def _number(config: Mapping[str, object], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else default


def _head_dim(config: Mapping[str, object]) -> int:
    heads = _number(config, "num_attention_heads", 1)
    return _number(config, "head_dim", _number(config, "hidden_size", heads) // heads)


def num_draft_tokens(spec: ModelSpec) -> int:
    """Tokens drafted a step; 0 without drafting."""
    if not spec.option("draft"):
        return 0
    number = spec.option("num_draft_tokens", 4)
    if not isinstance(number, int) or not 1 <= number <= MAX_DRAFT_TOKENS:
        raise ModelUnsupported(f"num_draft_tokens is {number}; it runs from 1 to {MAX_DRAFT_TOKENS}.")
    return number


def kv_cache_bytes(config: Mapping[str, object], kind: str, length: int, num_devices: int = 1) -> int:
    """Bytes of the SDK's preallocated cache, with the fp16 copy of one layer that quantised ones need a device.

    >>> qwen3 = {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    >>> kv_cache_bytes(qwen3, "fp16", 1) // 1024, kv_cache_bytes(qwen3, "q4", 1, 0) // 1024
    (256, 72)
    """
    width = _number(config, "num_key_value_heads", _number(config, "num_attention_heads", 1)) * _head_dim(config)
    elements = _number(config, "num_hidden_layers", 0) * width * length
    bits = sum(CACHE_BITS[kind])
    temporary = 0 if kind == "fp16" else num_devices * 2 * length * width * 2
    return int(elements * bits / 8) + temporary


@dataclass(kw_only=True)
class Parts:
    """The SDK's live objects, and what was measured while they were made."""

    sdk: Sdk
    plan: Plan
    attention: Attention
    model: Any
    cache: Any
    config: Any
    chunk_len: int
    bytes: Bytes

    def free(self) -> None:
        """Unload the model and drop every reference to device memory. Calling it again does nothing."""
        if self.model is not None:
            self.model.unload()
        if self.attention.hold is not None:
            self.attention.hold.close()
        self.model = self.cache = self.config = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


Progress = Generator[LoadProgress, None, Parts]


def load_parts(sdk: Sdk, spec: ModelSpec, *, device: str) -> Progress:
    """Yield progress, return the loaded parts; closing it, or an error, frees what was loaded."""
    planned = plan(spec)
    check_room(planned, device)
    folder = planned.folder
    if planned.needs_repack:
        folder = yield from repack(planned.folder)
    with translate_errors("Reading the config", ModelLoadFailed):
        config = sdk.package.ExLlamaV2Config(str(folder))
        attention = _configure(sdk, config, planned, spec, device)
    before = _allocated()
    parts = Parts(
        sdk=sdk,
        plan=planned,
        attention=attention,
        model=sdk.package.ExLlamaV2(config),
        cache=None,
        config=config,
        chunk_len=config.max_input_len,
        bytes=Bytes(),
    )
    try:
        cache_class = getattr(sdk.package, CACHES[planned.kv_cache])
        parts.cache = cache_class(parts.model, max_seq_len=planned.cache_len, lazy=True)
        yield from _load_weights(parts)
        with host_stream_kept(), translate_errors("The first forward pass"):
            probe_causality(parts.model, parts.cache, config.vocab_size)
        parts.bytes = measure(parts, _allocated() - before)
    except BaseException:
        parts.free()
        raise
    return parts


def check_room(planned: Plan, device: str) -> None:
    """Raise OutOfMemory with all the numbers, before anything is loaded."""
    if not torch.cuda.is_available() or not device.startswith("cuda"):
        return
    free = sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
    need = planned.weights_bytes + planned.kv_bytes
    if need <= free:
        return
    per_token = planned.kv_bytes / planned.cache_len
    fits = int((free - planned.weights_bytes) / per_token) // PAGE * PAGE
    remedy = f"Set context_len to {fits} or less" if fits >= PAGE else "Unload other models"
    raise OutOfMemory(
        f"Weights of {format_bytes(planned.weights_bytes)} and a {planned.kv_cache} KV cache of "
        f"{format_bytes(planned.kv_bytes)} for {planned.cache_len} tokens do not fit into {format_bytes(free)} of free "
        f"memory. {remedy}{', or kv_cache to q4' if planned.kv_cache == 'fp16' else ''}."
    )


def _configure(sdk: Sdk, config: Any, planned: Plan, spec: ModelSpec, device: str) -> Attention:
    """Set the SDK's config; returns the attention that its settings make run."""
    base = planned.config["rope_theta"]
    assert isinstance(base, (int, float))
    config.rotary_embedding_base = float(base)
    if planned.config.get("rope_scaling") and not (config.alt_rope_method or config.scale_pos_emb != 1.0):
        raise ModelUnsupported(
            f"ExLlamaV2 would ignore this model's rope_scaling {planned.config['rope_scaling']}. {ELSEWHERE}"
        )
    config.max_seq_len = planned.cache_len
    config.max_batch_size = 1
    config.no_xformers = True
    attention = choose(
        sdk,
        spec.attention,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        device=device,
    )
    config.no_flash_attn = not attention.is_paged
    config.arch_compat_overrides(quiet=True)
    if config.no_flash_attn and attention.is_paged:
        attention = without_flash(spec.attention, "this model needs what this flash-attn cannot do")
    config.no_sdpa = attention.name != SDPA
    config.max_input_len = chunk_len(attention, num_heads=config.num_attention_heads, cache_len=planned.cache_len)
    return attention


def _load_weights(parts: Parts) -> Generator[LoadProgress, None, None]:
    """Drive the SDK's own loading generator; the host's stream and gradient mode are in place at every yield."""
    ticks: list[tuple[int, int]] = []

    def tick(done: int, total: int) -> Generator[None, None, None]:
        ticks.append((done, total))
        yield

    loading = parts.model.load_autosplit_gen(parts.cache, callback_gen=tick)
    try:
        while True:
            with host_stream_kept(), translate_errors(f"Loading {parts.plan.folder.name}", ModelLoadFailed):
                if next(loading, loading) is loading:
                    break
            with torch.inference_mode(False):
                done, total = ticks[-1]
                yield LoadProgress(done=done, total=total, unit="layers")
    finally:
        loading.close()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    return sum(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    """All tensors of a KV cache, the temporary ones included."""
    temporary = [one for pair in getattr(cache, "temp_tensors", {}).values() for one in pair]
    return [one for one in [*cache.all_tensors(), *temporary] if one is not None]


def measure(parts: Parts, allocated: int) -> Bytes:
    """Bytes by part: the cache's own tensors, the SDK's scratch, and of the rest that weights are."""
    kv = sum(one.nbytes for one in cache_tensors(parts.cache))
    scratch = 0
    for context in parts.model.device_context:
        tables = [context.scratch, *(context.sin or []), *(context.cos or [])]
        scratch += sum(one.nbytes for one in tables if one is not None)
    return Bytes(weights=max(0, allocated - kv - scratch), kv_cache=kv, scratch=scratch)


def resolve_device(asked: str) -> str:
    """The device that the SDK will use: the first CUDA one, and on to the next when that is full."""
    if not torch.cuda.is_available():
        raise EngineUnavailable("ExLlamaV2 runs on CUDA only, and torch sees no CUDA device. Use another engine.")
    if asked not in ("auto", "cuda", "cuda:0"):
        raise EngineUnavailable(
            f"ExLlamaV2 fills the devices in their order; it cannot start at {asked!r}. Set device to auto, and "
            "CUDA_VISIBLE_DEVICES to choose."
        )
    return "cuda:0"
