"""What our loop costs: the time of one decode step through the runtime, beside a bare transformers loop.

Both run in this process on the same model and prompt, greedily, and take turns token by token, so that whatever
else the machine does meets both; printed are medians and their ratio.

    python tools/bench_overhead.py MODEL [--rounds 3] [--tokens 64] [--device cpu] [--threads N]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime
from runtime.engines.base import Engine
from runtime.events import TextDelta
from runtime.stream import stream

PROMPT = "Describe a lighthouse on a cliff in a storm, as a painting."


def bare(model: Any, ids: torch.Tensor) -> Generator[None, None, None]:
    """One token at each `next`, by the shortest loop that transformers allows: its growing cache and argmax."""
    name = "cache" if hasattr(transformers, "GgufConfig") else "past_key_values"
    cache, token = transformers.DynamicCache(config=model.config), ids
    while True:
        with torch.inference_mode():
            logits = model(token, use_cache=True, logits_to_keep=1, **{name: cache}).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            token.item()
        yield


def ours(engine: Engine, num_tokens: int) -> Generator[None, None, None]:
    """Text at each `next`, by the whole path: loop, sampling, detokeniser, stop matcher, events, timings."""
    request = Request(prompt=Prompt.of(PROMPT), sampling=GREEDY, max_tokens=num_tokens)
    num_seen = 0
    for event in stream(engine, [request]):
        if isinstance(event, TextDelta):
            if event.num_tokens - num_seen == 1:
                yield
            num_seen = event.num_tokens


def step_s(loop: Generator[None, None, None]) -> float:
    began = time.perf_counter()
    next(loop)
    return time.perf_counter() - began


def one_round(engine: Engine, ids: torch.Tensor, num_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds of each decode step, (bare, ours); the first steps, which are prefill, are left out."""
    loops = bare(engine._model, ids), ours(engine, num_tokens + 16)  # type: ignore[attr-defined]
    for loop in loops:
        if next(loop, "ended") == "ended":
            raise SystemExit("The model gave no text. Choose a model that answers.")
    pairs = [tuple(map(step_s, loops if at % 2 else loops[::-1])) for at in range(num_tokens - 1)]
    ordered = [pair if at % 2 else pair[::-1] for at, pair in enumerate(pairs)]
    for loop in loops:
        loop.close()
    return [pair[0] for pair in ordered], [pair[1] for pair in ordered]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    spec = ModelSpec(model=options.model, engine="transformers", device=options.device, context_len=1024)
    all_bare: list[float] = []
    all_ours: list[float] = []
    with Runtime().lease(spec) as engine:
        encode = engine.encode
        engine.encode = lambda prompt: dataclasses.replace(encode(prompt), stop=())  # type: ignore[method-assign]
        ids = torch.tensor([encode(Prompt.of(PROMPT)).token_ids], device=engine.info.device)
        one_round(engine, ids, 4)
        for _ in range(options.rounds):
            bare_s, ours_s = one_round(engine, ids, options.tokens)
            all_bare += bare_s
            all_ours += ours_s
        info = engine.info
    times = statistics.median(all_bare), statistics.median(all_ours)
    print(f"{info.model} on {info.device}, {info.dtype}, {info.attention}, {len(all_bare)} steps of each")
    print(f"bare transformers loop: {times[0] * 1000:8.3f} ms a step, {1 / times[0]:.2f} tok/s (medians)")
    print(f"through the runtime:    {times[1] * 1000:8.3f} ms a step, {1 / times[1]:.2f} tok/s")
    print(f"ratio of speeds: {times[0] / times[1]:.3f}")


if __name__ == "__main__":
    main()
