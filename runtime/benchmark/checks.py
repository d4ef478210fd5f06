"""Sanity checks before a row counts. What cannot be checked here says so; it never says passed."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..engines.base import DecodeStep, Engine, Work
from ..models.info import ModelInfo
from ..request import GREEDY, Prompt
from .ceiling import STATE_BYTES, kv_bytes_per_token

PASSED = "passed"
NUM_TOKENS = 16
KV_TOLERANCE = 0.02
NEAR_TIE = {"bf16": 2**-6, "fp16": 2**-8}
"""By how much of the largest logit the best two may be apart where 16-bit rounding decides between them."""
BACK_BYTES = 2**20

Verdict = str
"""`passed`, with a remark if need be; or `failed: why`, or `not checked: why`."""


def run_checks(engine: Engine, info: ModelInfo | None) -> dict[str, Verdict]:
    """Each check's verdict by name."""
    checks: dict[str, Callable[[], Verdict]] = {
        "greedy equals a manual loop": lambda: _greedy(engine),
        "nothing offloaded": lambda: _offload(engine),
        "memory back after a run": lambda: _memory_back(engine),
        "KV bytes as computed": lambda: _kv_bytes(engine, info),
        "fast attention kernel launched": lambda: _kernel(engine, info),
    }
    return {name: check() for name, check in checks.items()}


def _greedy(engine: Engine) -> Verdict:
    """Greedy generate against one full forward pass for each token.

    In 16 bit the two may differ where the best two logits are nearly equal; what comes after that cannot be compared.
    """
    logits = getattr(engine, "logits", None)
    if logits is None or not engine.info.capabilities.has_logits:
        return f"not checked: {engine.info.engine} gives no logits"
    encoded = engine.encode(Prompt.of("What is the capital of France?"))
    work = Work(encoded=encoded, sampling=GREEDY, max_tokens=NUM_TOKENS, seed=0)
    steps = (step for _, step in engine.generate([work]))
    written = [one for step in steps if isinstance(step, DecodeStep) for one in step.token_ids]
    ids = list(encoded.token_ids or ())
    for at, one in enumerate(written):
        row = logits(tuple(ids))[-1]
        best = int(row.argmax())
        if best != one:
            gap, bound = float(row[best] - row[one]), NEAR_TIE.get(engine.info.dtype, 0.0) * float(row.abs().max())
            if gap <= bound:
                return f"{PASSED}: up to token {at}; there the two best logits are {gap:.3g} apart, under {bound:.3g}"
            return f"failed: token {at + 1} is {one} where a manual loop gives {best}, {gap:.3g} above it"
        ids.append(one)
    return PASSED


def _offload(engine: Engine) -> Verdict:
    count = engine.info.details.get("num_offloaded_layers")
    if not isinstance(count, int):
        return f"not checked: {engine.info.engine} does not tell where its layers lie"
    return PASSED if count == 0 else f"failed: {count} layers lie off the device, so this is no baseline"


def _kv_bytes(engine: Engine, info: ModelInfo | None) -> Verdict:
    held, context_len = engine.bytes.kv_cache, engine.info.context_len
    if info is None or not held or not context_len:
        return f"not checked: {engine.info.engine} does not tell the bytes of its KV cache"
    computed = kv_bytes_per_token(info, engine.info.kv_cache) * context_len + info.kv.state_elements * STATE_BYTES
    if abs(held - computed) <= KV_TOLERANCE * computed:
        return PASSED
    return f"failed: {held} bytes are held where {computed:.0f} are computed for {context_len} tokens"


def _memory_back(engine: Engine) -> Verdict:
    """Whether torch holds after an answer what it held after the one before."""
    torch = sys.modules.get("torch")
    if torch is None or not engine.info.device.startswith("cuda"):
        return f"not checked: {engine.info.device} does not tell what is allocated"
    held = []
    for _ in range(2):
        work = Work(encoded=engine.encode(Prompt.of("Hello.")), sampling=GREEDY, max_tokens=NUM_TOKENS, seed=0)
        for _ in engine.generate([work]):
            pass
        torch.cuda.synchronize(engine.info.device)
        held.append(torch.cuda.memory_allocated(engine.info.device))
    more = held[1] - held[0]
    return PASSED if more <= BACK_BYTES else f"failed: {more} bytes more are held after a second answer"


def _kernel(engine: Engine, info: ModelInfo | None) -> Verdict:
    """Whether the attention kernel that the engine names ran on the device: layers x forwards, by the profiler.

    Layers without attention, as in hybrid models, launch none: those with a KV cache count.
    """
    if not engine.info.device.startswith("cuda") or "flash" not in engine.info.attention:
        return f"not checked: no fast attention kernel is claimed on {engine.info.device} ({engine.info.attention})"
    from .profile import profile_decode

    kernels = profile_decode(engine, num_tokens=NUM_TOKENS)
    launches = sum(one.count for one in kernels if "flash" in one.name.lower())
    wanted = NUM_TOKENS * (info.kv.num_layers if info else 1)
    return (
        PASSED if launches >= wanted else f"failed: {launches} launches of a flash kernel where {wanted} are expected"
    )
