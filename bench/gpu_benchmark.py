"""The benchmark on a real GPU: a synthetic model at four lengths, with checks, counters and what the driver tells.

    python -m bench.gpu_benchmark --out DIR [--size 27b|7b|tiny] [--engine transformers] [--contexts 2048,8192,...]

The 27b has 26.9 billion parameters in bf16 (54 GB). Writes DIR/benchmark.json row by row, and DIR/benchmark.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench.synthetic_llm import TINY, Shape, write
from runtime import ModelSpec, Runtime
from runtime.benchmark.environment import environment
from runtime.benchmark.plan import Plan
from runtime.benchmark.plot import plot_of
from runtime.benchmark.run import Progress, RowDone, run
from runtime.benchmark.table import table_of
from runtime.device_memory import resolve
from runtime.devices import Devices

SHAPES = {
    "27b": Shape(hidden=5120, num_layers=52, num_heads=40, num_kv_heads=8, ffn=27648),
    "7b": Shape(),
    "tiny": TINY,
}


def work_folder(num_bytes: float) -> Path:
    """A new folder where so many bytes fit, in memory if possible."""
    places = [place for place in (Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()) if place.is_dir()]
    fitting = [place for place in places if shutil.disk_usage(place).free > 1.1 * num_bytes]
    return Path(tempfile.mkdtemp(prefix="bench-", dir=(fitting or places)[0]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SHAPES, default="27b")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--contexts", default="2048,8192,16384,32768")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = work_folder(54e9 if args.size == "27b" else 16e9)
    try:
        began = time.monotonic()
        num_bytes = write(folder, SHAPES[args.size], resolve("cuda" if args.size != "tiny" else "cpu"))
        print(f"{num_bytes / 1e9:.1f} GB written in {time.monotonic() - began:.0f} s", flush=True)
        plan = Plan(
            specs=(ModelSpec(model=str(folder), engine=args.engine),),
            contexts=tuple(map(int, args.contexts.split(","))),
            output_tokens=args.output_tokens,
            repeats=args.repeats,
            has_checks=True,
        )
        rows = measure(plan, args.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table_of(rows))
    plot_of(rows).save(args.out / "benchmark.png")
    return 1 if any(row["errors"] for row in rows) else 0


def measure(plan: Plan, out: Path) -> list[dict[str, object]]:
    """All rows; the file holds those that are done, and the device's state after each."""
    rows: list[dict[str, object]] = []
    devices, began = Devices(), time.monotonic()
    with contextlib.closing(Runtime()) as runtime:
        for event in run(plan, runtime):
            if isinstance(event, Progress):
                print(f"{time.monotonic() - began:6.1f} s  {event.done} of {event.total}: {event.what}", flush=True)
            elif isinstance(event, RowDone):
                state = devices.read(resolve("auto"))
                rows.append({**event.row, "device_state": state.as_dict(), "driver_fault": devices.fault})
                whole = {"environment": environment(), "rows": rows}
                (out / "benchmark.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    return rows


if __name__ == "__main__":
    sys.exit(main())
