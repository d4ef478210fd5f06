"""How much of a bare transformers loop's decode speed is left through the node, in the server.

    python -m tools.bench [--rounds N] [--max-tokens N]

Both run the same model on the same prompt greedily for the same number of tokens, in turn, in one server process: what
the process itself costs falls on both. The figures are printed, and kept in .build/bench.jsonl with the commit and the
machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.comfyui import BUILD, PACK_NAME, ROOT, ComfyUI
from tools.fault import Fault, told
from tools.model import make_model
from tools.prompt_run import run_prompt
from tools.run import FIRST_WORKFLOW, has_gpu, read_prompt

LONG_TASK = "Tell a long story about a lighthouse keeper, his daughter and a storm."
"""Something that a small model does not end before the tokens are spent."""


def node_of(prompt: dict[str, Any], class_type: str) -> str:
    """The id of the prompt's one node of a class."""
    (found,) = [node_id for node_id, node in prompt.items() if node["class_type"] == class_type]
    return found


def through_the_node(comfy: ComfyUI, prompt: dict[str, Any], seed: int) -> tuple[float, int]:
    """Decode tok/s and output tokens as the node reports them; a new seed makes the node run again."""
    generate = node_of(prompt, "ResidentGenerate")
    prompt[generate]["inputs"]["seed"] = seed
    run = run_prompt(comfy, prompt)
    if run.status != "success":
        raise Fault(f"The workflow ended as {run.status}: {run.error}")
    report = json.loads(run.outputs[generate]["report"][0])
    return report["decode_tokens_per_s"], report["num_output_tokens"]


def bare_loop(
    comfy: ComfyUI, prompt: dict[str, Any], model_path: Path, device: str, num_tokens: int, run: int
) -> float:
    """Decode tok/s of the plainest loop there is, on the same messages, in the same process: a node for this alone."""
    texts = prompt[node_of(prompt, "ResidentPrompt")]["inputs"]
    messages = [{"role": role, "content": texts[role]} for role in ("system", "user") if texts[role]]
    inputs = {
        "model_path": str(model_path),
        "device": device,
        "messages": json.dumps(messages),
        "num_tokens": num_tokens,
        "run": run,
    }
    done = run_prompt(comfy, {"1": {"class_type": "BenchBareLoop", "inputs": inputs}})
    if done.status != "success":
        raise Fault(f"The bare loop ended as {done.status}: {done.error}")
    return float(done.outputs["1"]["rate"][0])


def measure(num_rounds: int, max_tokens: int) -> dict[str, Any]:
    """Rates of both, in tok/s, one pair per round after a round that warms up."""
    model_path = make_model()
    prompt = read_prompt(FIRST_WORKFLOW)
    prompt[node_of(prompt, "ResidentLoadLLM")]["inputs"].update(engine="transformers", dtype="float32")
    prompt[node_of(prompt, "ResidentSampling")]["inputs"].update(temperature=0.0, repetition_penalty=1.0)
    prompt[node_of(prompt, "ResidentPrompt")]["inputs"].update(system="", user=LONG_TASK)
    prompt[node_of(prompt, "ResidentGenerate")]["inputs"]["max_tokens"] = max_tokens
    is_on_gpu = has_gpu()
    device = "cuda" if is_on_gpu else "cpu"
    packs = {PACK_NAME: ROOT, "bare-loop": ROOT / "tools" / "bare_loop"}
    node_rates: list[float] = []
    bare_rates: list[float] = []
    with ComfyUI(BUILD / "run", packs=packs, models=[model_path], is_on_cpu=not is_on_gpu) as comfy:
        _, num_tokens = through_the_node(comfy, prompt, seed=0)
        bare_loop(comfy, prompt, model_path, device, num_tokens, run=0)
        for seed in range(1, num_rounds + 1):
            rate, num_tokens = through_the_node(comfy, prompt, seed)
            node_rates.append(rate)
            bare_rates.append(bare_loop(comfy, prompt, model_path, device, num_tokens, run=seed))
            print(f"round {seed}: node {rate:.2f} tok/s, bare loop {bare_rates[-1]:.2f} tok/s", flush=True)
    return summary(node_rates, bare_rates, num_tokens)


def summary(node_rates: Sequence[float], bare_rates: Sequence[float], num_tokens: int) -> dict[str, Any]:
    """Medians, and the median of the rounds' ratios: neighbours in time share what else the machine was doing."""
    ratios = [node / bare for node, bare in zip(node_rates, bare_rates, strict=True)]
    return {
        "node_tokens_per_s": statistics.median(node_rates),
        "bare_tokens_per_s": statistics.median(bare_rates),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "num_tokens": num_tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    row = measure(arguments.rounds, arguments.max_tokens)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    row |= {"commit": commit.stdout.strip(), "machine": f"{platform.machine()} x{os.cpu_count()}", "at": time.time()}
    with (BUILD / "bench.jsonl").open("a") as kept:
        kept.write(json.dumps(row) + "\n")
    print(
        f"median of {arguments.rounds} rounds of {row['num_tokens']} tokens: node {row['node_tokens_per_s']:.2f}, bare "
        f"transformers loop {row['bare_tokens_per_s']:.2f} tok/s, ratio {row['ratio']:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
