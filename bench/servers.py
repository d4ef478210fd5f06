"""What is left of a server's speed through the node, beside a bare HTTP client; and a soak of lists for minutes.

    python -m bench.servers URL MODEL [--key KEY] [--load GGUF] [--concurrent 16] [--rounds 8] [--soak 300] [--out FILE]

The node runs in a real ComfyUI of its own, as Connect LLM Server -> Generate Text, or with --load as Load LLM with
engine llamacpp. The bare client posts the same messages with the same seeds to the server at URL and counts what comes;
both take turns, so that a busy machine hits both.
With one prompt at a time the figure is the decode rate (tokens after the first, first to last), with more it is the
whole list's output tokens by the seconds from queueing the graph to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from tools.comfyui import ComfyUI
from tools.fault import Fault, told
from tools.prompt_run import run_prompt

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class Turn(NamedTuple):
    """Tokens per second, output tokens, and the texts in order."""

    rate: float
    num_tokens: int
    texts: list[str]


def asked(tag: str, count: int) -> list[str]:
    return [f"Write about {tag} {at}, at length." for at in range(count)]


def loader(args: argparse.Namespace) -> dict[str, Any]:
    if args.load is None:
        inputs = {"profile": "box", "model": args.model, "other_model": "", "when_idle": "keep"}
        return {"class_type": "ResidentConnectServer", "inputs": inputs}
    inputs = {"model": args.load.name, "engine": "llamacpp", "device": "auto", "dtype": "auto", "attention": "auto"}
    inputs |= {"context_len": 2048, "kv_cache": "auto", "when_idle": "keep", "host_copy_gb": -1}
    return {"class_type": "ResidentLoadLLM", "inputs": inputs}


def through_the_node(comfy: ComfyUI, llm: dict[str, Any], questions: Sequence[str], seed: int, max_tokens: int) -> Turn:
    """One run of the graph; raises Fault if it fails or an item is missing."""
    answer = {"llm": ["1", 0], "prompt": ["2", 0], "sampling": ["3", 0], "max_tokens": max_tokens, "seed": seed}
    sampling = {name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    graph = {
        "1": llm,
        "2": {"class_type": "ResidentLines", "inputs": {"text": "\n".join(questions)}},
        "3": {"class_type": "ResidentSampling", "inputs": sampling},
        "4": {"class_type": "ResidentGenerate", "inputs": {**answer, "thinking_budget": 0, "on_cut_thinking": "error"}},
    }
    began = time.perf_counter()
    run = run_prompt(comfy, graph, timeout_s=900)
    whole_s = time.perf_counter() - began
    if run.status != "success":
        raise Fault(f"The graph ended as {run.status}: {run.error}")
    reports = [json.loads(report) for report in run.outputs["4"]["report"]]
    if len(reports) != len(questions):
        raise Fault(f"{len(questions)} prompts went in, {len(reports)} answers came out.")
    num_tokens = sum(report["num_output_tokens"] for report in reports)
    rate = reports[0]["decode_tokens_per_s"] if len(reports) == 1 else num_tokens / whole_s
    return Turn(rate, num_tokens, list(run.outputs["4"]["text"]))


async def bare(url: str, key: str, model: str, questions: Sequence[str], seed: int, max_tokens: int) -> Turn:
    """The same by a client that does nothing but read. One token comes in each chunk with text, the stop in none."""
    async with httpx2.AsyncClient(timeout=900, headers={"Authorization": f"Bearer {key}"}) as client:

        async def one(at: int) -> tuple[str, int, list[float]]:
            body = {
                **SAMPLING,
                "model": model,
                "messages": [{"role": "user", "content": questions[at]}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": max_tokens,
                "seed": seed + at,
            }
            text, num_tokens, marks = "", 0, []
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    for choice in chunk["choices"]:
                        if choice["delta"].get("content"):
                            text += choice["delta"]["content"]
                            marks.append(time.perf_counter())
                    num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
            return text, num_tokens, marks

        began = time.perf_counter()
        answers = await asyncio.gather(*(one(at) for at in range(len(questions))))
        whole_s = time.perf_counter() - began
    total = sum(num_tokens for _, num_tokens, _ in answers)
    marks = answers[0][2]
    rate = (len(marks) - 1) / (marks[-1] - marks[0]) if len(answers) == 1 else total / whole_s
    return Turn(rate, total, [text for text, _, _ in answers])


def measure(comfy: ComfyUI, args: argparse.Namespace) -> dict[str, Any]:
    """Rates of both, one pair per round after a round that warms up."""
    pairs: list[tuple[Turn, Turn]] = []
    for at in range(args.rounds + 1):
        num_tokens = args.max_tokens if at else 8
        questions = asked(f"the winter of {1900 + at}, part", args.concurrent)
        turns = {}
        for who in ("node", "bare") if at % 2 else ("bare", "node"):
            if who == "node":
                turns[who] = through_the_node(comfy, loader(args), questions, 1000 * at, num_tokens)
            else:
                turns[who] = asyncio.run(bare(args.url, args.key, args.model, questions, 1000 * at, num_tokens))
        if at:
            pairs.append((turns["node"], turns["bare"]))
            print(f"round {at}: node {turns['node'].rate:.2f}, bare {turns['bare'].rate:.2f} tok/s", flush=True)
    ratios = [node.rate / plain.rate for node, plain in pairs]
    same = [one == other for node, plain in pairs for one, other in zip(node.texts, plain.texts, strict=True)]
    return {
        "what": "decode tok/s" if args.concurrent == 1 else "output tok/s of the list",
        "concurrent": args.concurrent,
        "node": [node.rate for node, _ in pairs],
        "bare": [plain.rate for _, plain in pairs],
        "ratio": statistics.median(ratios),
        "ratio_of_sums": sum(node.rate for node, _ in pairs) / sum(plain.rate for _, plain in pairs),
        "ratios": ratios,
        "node_tokens": sum(node.num_tokens for node, _ in pairs),
        "bare_tokens": sum(plain.num_tokens for _, plain in pairs),
        "equal_texts": f"{sum(same)} of {len(same)}",
    }


def soak(comfy: ComfyUI, args: argparse.Namespace) -> dict[str, Any]:
    """Lists of 8 and 16 in turn, each with the same seeds every time: counts, places kept, the server's memory."""
    assert comfy.process is not None
    statm = Path(f"/proc/{comfy.process.pid}/statm")
    began, sizes, rss_mb, num_in_place = time.monotonic(), [], [], 0
    first: dict[int, list[str]] = {}
    while time.monotonic() - began < args.soak:
        size = 8 if len(sizes) % 2 else 16
        texts = through_the_node(comfy, loader(args), asked("the item", size), 100 * size, 24).texts
        num_in_place += sum(map(str.__eq__, texts, first.setdefault(size, texts)))
        sizes.append(size)
        rss_mb.append(round(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6))
        print(f"{len(sizes)} lists, {num_in_place} of {sum(sizes)} items in place, {rss_mb[-1]} MB", flush=True)
    assert len(set(first[16])) == 16
    return {"soak_s": args.soak, "lists": len(sizes), "items": sum(sizes), "in_place": num_in_place, "rss_mb": rss_mb}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--key", default="none")
    parser.add_argument("--tokenizer", default="", help="the model's folder: the node then sends ids")
    parser.add_argument("--load", type=Path, help="a GGUF file that the node loads itself, instead of connecting")
    parser.add_argument("--name", default="", help="what the server is, for the row")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of lists of 8 and 16 in turn")
    parser.add_argument("--out", type=Path, help="a .jsonl file that gets a row")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profiles = Path(folder) / "profiles.json"
        box = {"base_url": args.url, "key": args.key, "tokenizer": args.tokenizer}
        profiles.write_text(json.dumps({"profiles": {"box": box}}))
        profiles.chmod(0o600)
        row = {"server": args.name, "model": args.model, "machine": f"{platform.machine()} x{os.cpu_count()}"}
        models = [args.load] if args.load else []
        with ComfyUI(Path(folder) / "comfy", models=models, env={"RESIDENT_LLM_PROFILES": str(profiles)}) as comfy:
            if args.rounds:
                row |= measure(comfy, args)
                print(
                    f"node / bare: median {row['ratio']:.3f}, by sums {row['ratio_of_sums']:.3f}, {row['equal_texts']}"
                )
            if args.soak:
                row |= soak(comfy, args)
    if args.out:
        with args.out.open("a", encoding="utf-8") as kept:
            kept.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
