"""A model and a machine -> the vLLM command that serves it, and the process group that runs it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .errors import EngineUnavailable, InvalidValue, ServerError
from .models.info import ModelInfo
from .telemetry import format_bytes

KV_BYTES = {"auto": 2, "fp8": 1}
"""Bytes of one cached value."""

OVERHEAD_BYTES = 2_000_000_000
"""What vLLM takes of each card beside weights and KV cache: CUDA context, captured graphs, activations."""

CONTEXT_STEP = 1024
STOP_S = 15.0
READY_POLL_S = 0.5

REASONING_PARSERS = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_5": "qwen3", "qwen3_5_moe": "qwen3"}
"""Model types whose chat endpoint tells thinking apart when asked to."""

REPLACED = {
    "--model-type": "The type is read from the model's config.json; leave the flag out.",
    "--stop": "Stop strings belong to a request: set them in LLM Prompt.",
    "--rope-theta": "It is read from config.json; to change it use --hf-overrides with JSON.",
    "--cache-q4": "That is ExLlamaV2's; for a smaller KV cache use --kv-cache-dtype fp8.",
    "--swap-space": "It is gone; for more room use --cpu-offload-gb, or a smaller --max-model-len.",
    "--enforce-eager": "It switches CUDA graphs off, which costs much of the decode speed; leave it out on a GPU.",
    "--trust-remote-code": "It runs code that comes with the model. Read that code first, then start vLLM by hand.",
    "--api-key": "A key on a command line is seen by every user of the machine; set VLLM_API_KEY instead.",
}
"""Flags of write-ups that do not exist any more or do harm, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU: its name and its bytes in all."""

    name: str
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user asked for.

    gpu_fraction: part of each card that vLLM may take
    context_len:  None is what fits, up to what the model was made for
    """

    served_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    gpu_fraction: float = 0.9
    context_len: int | None = None
    kv_cache: str = "auto"
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.gpu_fraction <= 1:
            raise InvalidValue(f"The GPU fraction is {self.gpu_fraction}; it runs from just above 0 to 1.")

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A command with what it needs in its environment, and what the user should know."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


def check_flags(extra: Sequence[str]) -> None:
    """Raise InvalidValue naming what to use in place of a flag that is gone or does harm."""
    for word in extra:
        if (reason := REPLACED.get(word.partition("=")[0])) is not None:
            raise InvalidValue(f"{word.partition('=')[0]} is not for this: {reason}")


def plan(info: ModelInfo, wish: Wish, cards: Sequence[Card], launcher: Sequence[str]) -> Plan:
    """The command for this model on these cards; raises InvalidValue with the numbers where it cannot fit."""
    check_flags(wish.extra)
    if info.format == "gguf":
        raise InvalidValue(
            "vLLM is not made for GGUF files. Use the engine llamacpp for them, or an AWQ or GPTQ folder."
        )
    notes: list[str] = []
    model = [info.path] if "serve" in launcher[-1:] else ["--model", info.path]  # `vllm serve` takes it by place
    argv = [*launcher, *model, "--served-model-name", wish.served_name]
    argv += ["--host", wish.host, "--port", str(wish.port), "--enable-prompt-tokens-details"]
    if wish.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(wish.tensor_parallel)]
    if wish.pipeline_parallel > 1:
        argv += ["--pipeline-parallel-size", str(wish.pipeline_parallel)]
        notes.append(
            "For several hosts give --nnodes, --node-rank and --master-addr in --flags, and start it on each host; "
            "or start Ray on all of them first and add --distributed-executor-backend ray."
        )
    context_len = wish.context_len
    if cards:
        argv += ["--gpu-memory-utilization", f"{wish.gpu_fraction:g}"]
        fitting = _fitting_context(info, wish, cards)
        if context_len is None and info.context_len and fitting < info.context_len:
            context_len = fitting // CONTEXT_STEP * CONTEXT_STEP
            notes.append(f"The context is {context_len} of the model's {info.context_len}: that much KV cache fits.")
        elif context_len is not None and context_len > fitting:
            notes.append(f"A context of {context_len} may not fit: by our count {fitting} tokens do.")
    if context_len is not None:
        argv += ["--max-model-len", str(context_len)]
    if wish.kv_cache != "auto":
        argv += ["--kv-cache-dtype", wish.kv_cache]
    if info.quant_method:
        notes.append(f"The weights are {info.quant_method}; vLLM finds that in config.json and picks its kernels.")
    if parser := REASONING_PARSERS.get(info.model_type.removesuffix("_text")):
        argv += ["--reasoning-parser", parser]
    env: dict[str, str] = {}
    if wish.is_loopback and cards:
        argv += ["--enable-sleep-mode"]
        env["VLLM_SERVER_DEV_MODE"] = "1"
        notes.append("when_idle = sleep works in Connect LLM Server: the server shares the card with ComfyUI.")
    elif not wish.is_loopback:
        notes.append(
            f"{wish.host} is no loopback address: set VLLM_API_KEY, and let no stranger reach it, as only /v1 asks for "
            "the key. Sleep mode stays off, since its endpoints ask for no key."
        )
    return Plan(argv=(*argv, *wish.extra), env=env, notes=tuple(notes))


def _fitting_context(info: ModelInfo, wish: Wish, cards: Sequence[Card]) -> int:
    """Tokens whose KV fits beside the weights on the smallest card; raises InvalidValue if the weights do not."""
    num_ranks = wish.tensor_parallel * wish.pipeline_parallel
    smallest = min(card.total_bytes for card in cards)
    room = smallest * wish.gpu_fraction - OVERHEAD_BYTES - info.weights_bytes / num_ranks
    if room <= 0:
        raise InvalidValue(
            f"{format_bytes(info.weights_bytes)} of weights over {num_ranks} cards do not fit into "
            f"{wish.gpu_fraction:.0%} of {format_bytes(smallest)} each. Take a smaller or 4-bit model, or more cards "
            "(--tensor-parallel)."
        )
    per_token = info.kv.elements_per_token * KV_BYTES.get(wish.kv_cache.partition("_")[0], 2)
    split = wish.pipeline_parallel * max(1, min(wish.tensor_parallel, info.kv.num_heads))
    return int(room * split / max(per_token, 1))


class ManagedServer:
    """A vLLM in a process group of its own, which ends when this is closed."""

    def __init__(self, made: Plan, url: str) -> None:
        self._url = url
        env = {**os.environ, **made.env, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        try:
            self._process = subprocess.Popen(made.argv, env=env, start_new_session=True)
        except OSError as error:
            raise EngineUnavailable(
                f"{made.argv[0]} cannot be started ({error.strerror}). Install vLLM into an environment of its own "
                "(python -m venv vllm-env; vllm-env/bin/pip install vllm) and name it: --python vllm-env/bin/python"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, on_wait: Callable[[float], None]) -> None:
        """Return once /health answers; raises ServerError if the server ends before."""
        began = time.monotonic()
        while True:
            if (code := self._process.poll()) is not None:
                raise ServerError(f"vLLM ended with {code} before it was ready. Its own last lines above say why.")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=2):
                return
            on_wait(time.monotonic() - began)
            time.sleep(READY_POLL_S)

    def wait(self) -> int:
        """The server's exit code, when it ends."""
        return self._process.wait()

    def close(self) -> None:
        """End the whole group: asked first, then forced. Calling it again does nothing."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if not self._signal(signum):
                break
            deadline = time.monotonic() + STOP_S
            while time.monotonic() < deadline and self._signal(0):
                self._process.poll()
                time.sleep(0.05)
        self._process.wait()

    def _signal(self, signum: int) -> bool:
        """Send to the group; False if none of it is left."""
        try:
            os.killpg(self._process.pid, signum)
        except (ProcessLookupError, PermissionError):
            return False
        return True
