"""GGUF models in this process: llama.cpp with its own HTTP server on loopback, through the package xllamacpp.

The server listens on a free port of 127.0.0.1 under a random key, and the client for servers speaks to it; prompts are
ids of our own prompting here too. The engine owns the server: closing the one ends the other.
Options of a spec: `gpu_layers`, `threads`, `parallel` (requests at once, each with the whole context),
`prompt_cache_mib` (host memory for prompts besides the last).
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xllamacpp

from ..device_memory import DeviceMemory
from ..device_memory import read as read_memory
from ..errors import EngineUnavailable, ModelLoadFailed, ModelUnsupported
from ..events import LoadProgress
from ..models.info import ModelInfo, read_model
from ..profiles import Profile
from ..prompting.prompter import Prompter
from ..request import ModelSpec, Prompt
from ..telemetry import Bytes
from .base import Capabilities, Encoded, EngineInfo, Loading, Steps, Work
from .server.answers import Member
from .server.engine import ServerEngine
from .server.facts import ask_facts
from .server.http import Http, LoopThread

log = logging.getLogger(__name__)

MODEL_NAME = "model"

KV_TYPES = {"auto": "F16", "fp16": "F16", "q8": "Q8_0", "q4": "Q4_0"}
"""Our names of KV precision to ggml's."""

KV_BITS = {"F16": 16.0, "Q8_0": 8.5, "Q4_0": 4.5}
"""Bits of one element: blocks of 32 with one 16-bit scale."""

ALL_LAYERS = -1

CONTEXT_STEP = 256
"""llama.cpp rounds the context up to this."""


class LlamaCppEngine:
    """One GGUF model and the server that runs it."""

    def __init__(self, native: Any, client: ServerEngine, info: EngineInfo, num_bytes: Bytes) -> None:
        self._native = native
        self._client = client
        self._bytes = num_bytes
        self.info = info

    @property
    def bytes(self) -> Bytes:
        return self._bytes

    def encode(self, prompt: Prompt) -> Encoded:
        return self._client.encode(prompt)

    def generate(self, batch: Sequence[Work]) -> Steps:
        return self._client.generate(batch)

    def trim(self, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        """End the server, which frees everything. Calling it again does nothing."""
        self._client.close()
        self._native = None
        self._bytes = Bytes()
        gc.collect()


def find_file(model: str) -> Path:
    """The GGUF file of a model: the file itself, or the only one in a folder (the first part of a split one)."""
    path = Path(model)
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1 or (files and "-00001-of-" in files[0].name):
        return files[0]
    raise ModelUnsupported(
        f"{path.name} holds {len(files)} GGUF files, and llama.cpp needs to be told one. Pick the file itself."
    )


def kv_type(spec: ModelSpec) -> str:
    """The ggml type of keys and values; raises ModelUnsupported for one that llama.cpp has not."""
    if spec.kv_cache not in KV_TYPES:
        raise ModelUnsupported(
            f"llama.cpp has no {spec.kv_cache} KV cache. Set kv_cache to one of {', '.join(KV_TYPES)}."
        )
    return KV_TYPES[spec.kv_cache]


def context_len(spec: ModelSpec, info: ModelInfo) -> int:
    wanted = spec.context_len or info.context_len or 4096
    return -(-wanted // CONTEXT_STEP) * CONTEXT_STEP


def footprint(spec: ModelSpec) -> Bytes:
    """Weights as stored, and the KV cache of all requests at once; what is not on the spec's device is `host_copy`."""
    check_device(spec)
    info = read_model(str(find_file(spec.model)))
    tokens = context_len(spec, info) * num_parallel(spec)
    kv_bytes = int(info.kv.elements_per_token * tokens * KV_BITS[kv_type(spec)] / 8)
    share = 1.0 if spec.device == "cpu" else offloaded(spec, info)
    weights, kv_cache = int(info.weights_bytes * share), int(kv_bytes * share)
    return Bytes(weights=weights, kv_cache=kv_cache, host_copy=info.weights_bytes + kv_bytes - weights - kv_cache)


def settle(spec: ModelSpec) -> ModelSpec:
    """The spec with context, cache and device as they come out here; types and attention are llama.cpp's own."""
    info = read_model(str(find_file(spec.model)))
    kv_cache = "fp16" if spec.kv_cache == "auto" else spec.kv_cache
    return replace(
        spec,
        device=_device(spec, info),
        dtype="auto",
        attention="auto",
        kv_cache=kv_cache,
        context_len=context_len(spec, info),
    )


def offloaded(spec: ModelSpec, info: ModelInfo) -> float:
    """The part of the layers that lies on a GPU: none in a build without one, all if the spec does not say."""
    layers = spec.whole_number("gpu_layers", ALL_LAYERS, least=ALL_LAYERS)
    if spec.device == "cpu" or not num_gpus():
        return 0.0
    return 1.0 if layers == ALL_LAYERS else min(1.0, layers / max(info.num_layers, 1))


def num_gpus() -> int:
    """The GPUs that this build of llama.cpp sees; none in a build for the CPU."""
    return sum("GPU" in str(device["type"]) for device in xllamacpp.get_device_info())


def check_device(spec: ModelSpec) -> None:
    """Raise EngineUnavailable for a GPU that llama.cpp would silently leave out."""
    kind, _, index = spec.device.partition(":")
    if kind not in ("auto", "cpu") and int(index or 0) >= num_gpus():
        raise EngineUnavailable(
            f"There is no device {spec.device} for llama.cpp: its build shows {num_gpus()} GPUs. Choose auto or cpu, "
            "or install xllamacpp with GPU support."
        )


def num_parallel(spec: ModelSpec) -> int:
    return spec.whole_number("parallel", 1, least=1)


def num_threads(spec: ModelSpec) -> int:
    """Threads of the spec, else one per core that this process may use; with more they wait on each other."""
    told = spec.whole_number("threads", 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return told or min(cores, _quota() or cores)


def _quota(path: str = "/sys/fs/cgroup/cpu.max") -> int | None:
    """Whole cores that a container may use; None without a limit."""
    try:
        quota, period = Path(path).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


def _params(spec: ModelSpec, info: ModelInfo, key: str) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = info.path
    params.n_parallel = num_parallel(spec)
    params.n_ctx = context_len(spec, info) * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads(spec)
    name = kv_type(spec)
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name}")
    if name != "F16":  # quantised values need it
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.fit_params = False
    if spec.option("gpu_layers") is not None or spec.device == "cpu":
        params.n_gpu_layers = spec.whole_number("gpu_layers", 0, least=ALL_LAYERS)
    if spec.device.startswith("cuda:"):
        params.main_gpu = int(spec.device.removeprefix("cuda:"))
    params.cache_ram_mib = spec.whole_number("prompt_cache_mib", 0)
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]
    params.model_alias = [MODEL_NAME]
    params.endpoint_metrics = True
    params.ui = False
    params.verbosity = 0
    return params


def load(spec: ModelSpec) -> Loading:
    """Start the server with the model; the start itself cannot be interrupted, as llama.cpp holds the interpreter."""
    file = find_file(spec.model)
    info = read_model(str(file))
    key = secrets.token_urlsafe(24)
    params = _params(spec, info, key)
    total = info.weights_bytes
    yield LoadProgress(done=0, total=total)
    prompter = Prompter.load(str(file))
    yield LoadProgress(done=0, total=total)
    before = read_memory(spec.device)
    try:
        native = xllamacpp.Server(params)
    except (RuntimeError, ValueError, MemoryError) as error:
        raise ModelLoadFailed(
            f"llama.cpp could not load {file.name} with a context of {params.n_ctx}: {error} "
            "Set a smaller context_len, or check the file."
        ) from error
    loop = LoopThread()
    try:
        address = native.listening_address
        http = Http(Profile(name="llamacpp", base_url=address, key=key, max_concurrent=num_parallel(spec)), loop)
        facts = ask_facts(http)
        member = Member(http, facts, facts.models[0])
        client = ServerEngine(spec, loop, [member], prompter)
        yield LoadProgress(done=total, total=total)
    except BaseException:
        loop.close()
        raise
    num_bytes = footprint(spec)
    if offloaded(spec, info):
        num_bytes = replace(num_bytes, scratch=_scratch(before, read_memory(spec.device), num_bytes))
    return LlamaCppEngine(native, client, _describe(spec, info, member), num_bytes)


def _scratch(before: DeviceMemory | None, after: DeviceMemory | None, computed: Bytes) -> int:
    """What the device lost beyond weights and KV cache: compute buffers and the context."""
    return max(0, before.free - after.free - computed.device) if before and after else 0


def _device(spec: ModelSpec, info: ModelInfo) -> str:
    if not offloaded(spec, info):
        return "cpu"
    return "cuda:0" if spec.device in ("auto", "cuda") else spec.device


def _describe(spec: ModelSpec, info: ModelInfo, member: Member) -> EngineInfo:
    return EngineInfo(
        engine="llamacpp",
        model=Path(info.path).name,
        context_len=member.model.context_len,
        made_for=info.context_len,
        device=_device(spec, info),
        dtype=info.quant_method or "gguf",
        attention="llama.cpp",
        kv_cache=kv_type(spec).lower(),
        capabilities=Capabilities(can_feed=False, can_batch=num_parallel(spec) > 1, has_prefix_reuse=True),
        details={"threads": num_threads(spec)},
    )
