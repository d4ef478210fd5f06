"""Compile an engine's extension here, in a process of its own, only when asked to."""

from __future__ import annotations

import argparse
import sys

HELP = "Compile ExLlamaV2's extension for this Python, torch and CUDA."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", choices=("exllamav2",), help="what to compile")
    parser.add_argument(
        "--jobs", type=int, default=4, help="compiler processes at once; each takes 1 to 3 GB of memory"
    )


def run(args: argparse.Namespace) -> int:
    from ..engines.exllamav2_build import build

    is_terminal = sys.stderr.isatty()
    for line in build(num_jobs=args.jobs):
        start = "\r\x1b[K" if is_terminal else ""
        print(f"{start}{line}", end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    if is_terminal:
        print(file=sys.stderr)
    print("ExLlamaV2's extension is ready.")
    return 0
