"""Repack an AWQ folder for ExLlamaV2 into the cache folder, or check one that is there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import ModelLoadFailed, ModelUnsupported
from ..telemetry import format_bytes

HELP = "Repack an AWQ model for ExLlamaV2, without loss; --check verifies model and repack."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder with AWQ or compressed-tensors weights")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on damage of the model or its repack"
    )
    parser.add_argument(
        "--into", metavar="FOLDER", help="the cache folder; default: RESIDENT_LLM_CACHE, or the user's cache"
    )


def run(args: argparse.Namespace) -> int:
    root = Path(args.into) if args.into else None
    return _check(args.model, root) if args.check else _repack(args.model, root)


def _repack(model: str, root: Path | None) -> int:
    from ..models.repack import repack

    making, is_terminal = repack(model, root), sys.stderr.isatty()
    while True:
        try:
            progress = next(making)
        except StopIteration as end:
            if is_terminal:
                print(file=sys.stderr)
            print(end.value)
            return 0
        if is_terminal:
            done, total = format_bytes(progress.done), format_bytes(progress.total)
            print(f"\r\x1b[K{progress.what}: {done} of {total}", end="", file=sys.stderr, flush=True)


def _check(model: str, root: Path | None) -> int:
    from ..models.awq import inspect_awq
    from ..models.repack import find_differences, repacked_folder

    report = inspect_awq(model)
    print(f"{report.verdict}: {report.reason}")
    if report.verdict == "not_awq":
        raise ModelUnsupported("Only AWQ models are repacked.")
    if report.verdict == "damaged":
        return 1
    target = repacked_folder(model, root)
    if not target.is_dir():
        print(f"not repacked yet; it would be {target}")
        return 0
    differences = list(find_differences(model, target))
    for difference in differences:
        print(difference)
    if differences:
        raise ModelLoadFailed(f"The repack in {target} is damaged. Delete that folder and repack again.")
    print(f"the repack in {target} holds the same weights, bit for bit")
    return 0
