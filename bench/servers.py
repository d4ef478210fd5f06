"""What the server engine costs beside a bare HTTP client, and whether it stays whole over minutes.

    python -m bench.servers http://127.0.0.1:8000 MODEL [--key KEY] [--rounds 4] [--soak 300]

Both clients send the same ids with the same seeds, 16 at a time, turn by turn, so that a noisy machine hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2

from runtime import ModelSpec, Prompt, Request, Runtime, Sampling, collect, profiles
from runtime.engines.base import TokenIds
from runtime.profiles import Profile

NUM_CONCURRENT = 16
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def requests(tag: str, count: int, max_tokens: int) -> list[Request]:
    return [
        Request(
            prompt=Prompt.of(f"Write about {tag} {at}, at length."),
            sampling=Sampling(temperature=1.0),
            max_tokens=max_tokens,
            seed=at,
        )
        for at in range(count)
    ]


def through_the_engine(runtime: Runtime, spec: ModelSpec, batch: Sequence[Request]) -> int:
    """Output tokens of a batch; raises if one item is missing."""
    collector = collect(runtime.generate(spec, batch), spec, batch)
    [resident] = runtime.residents()
    results = collector.results(resident.info, resident.bytes)
    assert len(results) == len(batch)
    return sum(int(str(result.report["num_output_tokens"])) for result in results)


async def bare(url: str, key: str, model: str, batch: Sequence[Request], prompts: Sequence[TokenIds]) -> int:
    """Output tokens of the same batch by a client that does nothing but read."""
    num_tokens = 0

    async def one(client: httpx2.AsyncClient, request: Request, ids: TokenIds) -> None:
        nonlocal num_tokens
        body = {
            **SAMPLING,
            "model": model,
            "prompt": list(ids),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "return_token_ids": True,
        }
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        num_tokens += len(choice["token_ids"] or ())

    async with httpx2.AsyncClient(timeout=600, headers={"Authorization": f"Bearer {key}"}) as client:
        await asyncio.gather(*(one(client, request, ids) for request, ids in zip(batch, prompts, strict=True)))
    return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--key", default="none")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of lists of 8 and 16 in turn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[profiles.PATH_VARIABLE] = str(Path(folder) / "profiles.json")
        profiles.write(Profile(name="box", base_url=args.url, key=args.key))
        spec, runtime = ModelSpec(model=f"box/{args.model}", engine="openai"), Runtime()
        measure(args, spec, runtime)
        soak(args, spec, runtime)
        runtime.close()


def measure(args: argparse.Namespace, spec: ModelSpec, runtime: Runtime) -> None:
    rates: dict[str, list[float]] = {"engine": [], "bare": []}
    through_the_engine(runtime, spec, requests("warm-up", NUM_CONCURRENT, 8))
    for round_ in range(args.rounds):
        batch = requests(f"round {round_}", NUM_CONCURRENT, 48)
        with runtime.lease(spec) as engine:
            prompts = [engine.encode(request.prompt).token_ids or () for request in batch]
        order = ("engine", "bare") if round_ % 2 else ("bare", "engine")
        for name in order:
            began = time.perf_counter()
            if name == "engine":
                num_tokens = through_the_engine(runtime, spec, batch)
            else:
                num_tokens = asyncio.run(bare(args.url, args.key, args.model, batch, prompts))
            rates[name].append(num_tokens / (time.perf_counter() - began))
        print(f"round {round_}: engine {rates['engine'][-1]:.1f}, bare {rates['bare'][-1]:.1f} tok/s", flush=True)
    if args.rounds:
        print(f"engine / bare: {sum(rates['engine']) / sum(rates['bare']):.3f}")


def soak(args: argparse.Namespace, spec: ModelSpec, runtime: Runtime) -> None:
    began, num_lists, num_items = time.monotonic(), 0, 0
    while time.monotonic() - began < args.soak:
        batch = requests(f"list {num_lists}", 8 if num_lists % 2 else 16, 24)
        through_the_engine(runtime, spec, batch)
        num_lists, num_items = num_lists + 1, num_items + len(batch)
        rss_mb = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
        print(f"{num_lists} lists, {num_items} items, {rss_mb:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
