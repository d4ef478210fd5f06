"""Measure models side by side; rows are written as they come."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from ..benchmark.environment import environment
from ..benchmark.plan import Plan
from ..benchmark.quality import measure_quality
from ..benchmark.rows import Row
from ..benchmark.run import Progress, RowDone
from ..benchmark.run import run as run_benchmark
from ..benchmark.table import compare, quality_table, table_of
from ..errors import InvalidValue, ResidentError
from ..events import Finished
from ..models.info import read_model
from ..request import ModelSpec
from ..runtime import get

QUALITY_CONTEXT = 12288
"""Tokens that the longest of the 25 prompts and its answer fit in, even where a letter is a token."""

HELP = "Measure models side by side, or `bench compare A.json B.json` for what changed."


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 256,1024") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="model folders or .gguf files; or: compare A B")
    parser.add_argument("--contexts", type=_numbers, default=(256, 1024), help="prompt lengths in tokens: 256,1024")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens of each answer; default: 64")
    parser.add_argument("--repeats", type=int, default=3, help="runs that are counted; default: 3")
    parser.add_argument("--warmup", type=int, default=1, help="runs that are not counted")
    parser.add_argument("--batch", type=_numbers, default=(1,), help="requests at once: 1,4")
    parser.add_argument("--kv", default="auto", help="precisions of the KV cache: fp16,q4")
    parser.add_argument("--engine", action="append", default=[], help="for each model in turn; the last one repeats")
    parser.add_argument("--device", default="auto", help="auto, cpu, or a GPU such as cuda:0")
    parser.add_argument("--dtype", default="auto", help="precision of the weights: auto, fp32, bf16, fp16")
    parser.add_argument(
        "--attention", default="auto", help="auto, sdpa, flash_attention_2, eager; the report says which one ran"
    )
    parser.add_argument("--check", action="store_true", help="run the sanity checks before a row counts")
    parser.add_argument(
        "--quality",
        action="store_true",
        help="compare texts and probabilities with the first model's on 25 prompts instead of measuring speed",
    )
    parser.add_argument("--profile", action="store_true", help="print the 20 dearest kernels of each model")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write rows and environment there")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write a plot there (.png)")


def run(args: argparse.Namespace) -> int:
    if args.models[0] == "compare" and not Path("compare").exists():
        return _compare(args.models[1:])
    plan = Plan(
        specs=_specs(args),
        contexts=args.contexts,
        output_tokens=args.output_tokens,
        repeats=args.repeats,
        warmup=args.warmup,
        batch_sizes=args.batch,
        kv_caches=tuple(args.kv.split(",")),
        has_checks=args.check,
    )
    _check_places(args)
    if args.quality:
        return _quality(plan, args.json)
    rows: list[Row] = []
    status = _Line()
    try:
        with contextlib.closing(run_benchmark(plan, get())) as benchmarking:
            for event in benchmarking:
                if isinstance(event, Progress):
                    left = "" if event.left_s is None else f", {event.left_s:.0f} s left"
                    status.show(f"{event.done} of {event.total} runs: {event.what}{left}")
                elif isinstance(event, RowDone):
                    rows.append(event.row)
                    _write(args.json, plan, rows)
    finally:
        status.show("")
        if rows:
            print(table_of(rows))
            _plot(args.plot, rows)
    if args.profile:
        _profile(plan)
    return 1 if any(row["errors"] for row in rows) else 0


def _check_places(args: argparse.Namespace) -> None:
    """Raise InvalidValue where results cannot be written: known before minutes of measuring, not after them."""
    for name, file in (("--json", args.json), ("--plot", args.plot)):
        if file is None:
            continue
        if not os.access(file.absolute().parent, os.W_OK):
            raise InvalidValue(
                f"{name} {file} cannot be written: there is no folder {file.parent} that one may write to."
            )
        if file.exists() and not file.is_file():
            raise InvalidValue(f"{name} {file} is there already and is no file. Give the name of a file.")
    if args.plot is not None and args.plot.suffix.lower() != ".png":
        raise InvalidValue(f"--plot {args.plot} is no .png file. Give a name that ends in .png.")


def _quality(plan: Plan, file: Path | None) -> int:
    """Print how the models and KV precisions of a plan write, each against the first."""
    specs = [
        replace(spec, kv_cache=kv, context_len=_quality_context(spec)) for kv in plan.kv_caches for spec in plan.specs
    ]
    measuring = measure_quality(specs, get(), output_tokens=plan.output_tokens)
    status, num_texts = _Line(), 0
    with contextlib.closing(measuring):
        while True:
            try:
                event = next(measuring)
            except StopIteration as end:
                rows: list[Row] = end.value
                break
            if isinstance(event, Finished):
                num_texts += 1
                status.show(f"{num_texts} texts")
    status.show("")
    print(quality_table(rows))
    _write(file, plan, rows)
    return 1 if any(row["error"] for row in rows) else 0


def _quality_context(spec: ModelSpec) -> int:
    """No more than the model was made for, as far as its files tell."""
    try:
        made_for = read_model(spec.model).context_len
    except ResidentError:
        made_for = None
    return min(made_for or QUALITY_CONTEXT, QUALITY_CONTEXT)


def _specs(args: argparse.Namespace) -> tuple[ModelSpec, ...]:
    engines = args.engine or ["auto"]
    return tuple(
        ModelSpec(
            model=model,
            engine=engines[min(at, len(engines) - 1)],
            device=args.device,
            dtype=args.dtype,
            attention=args.attention,
        )
        for at, model in enumerate(args.models)
    )


def _write(file: Path | None, plan: Plan, rows: list[Row]) -> None:
    """All rows so far; a reader never sees half a file."""
    if file is None:
        return
    whole = {
        "environment": environment(),
        "plan": {"contexts": list(plan.contexts), "repeats": plan.repeats},
        "rows": rows,
    }
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    part.replace(file)


def _plot(file: Path | None, rows: list[Row]) -> None:
    if file is not None:
        from ..benchmark.plot import plot_of

        plot_of(rows).save(file)


def _profile(plan: Plan) -> None:
    from ..benchmark.profile import profile_decode

    for cell in list(plan.cells())[:1]:
        for spec in cell.specs:
            with get().lease(spec) as engine:
                print(f"\n{spec.model}: the 20 dearest kernels of {plan.output_tokens} tokens")
                for one in profile_decode(engine, num_tokens=plan.output_tokens, most=20):
                    print(f"{1000 * one.total_s:9.2f} ms {one.count:7d} x  {one.name}")


def _compare(files: list[str]) -> int:
    if len(files) != 2:
        raise InvalidValue(f"compare takes two files, and {len(files)} are given.")
    before, after = (_read(Path(file)) for file in files)
    print(compare(before, after))
    return 0


def _read(file: Path) -> list[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidValue(f"{file} is no file of benchmark rows ({error}). Make one with --json {file}.") from error
    return list(rows)


class _Line:
    """One line on stderr that replaces itself, on a terminal only."""

    def show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
