"""What LLM Benchmark does when it runs; apart from the node, so that ComfyUI starts without the benchmark's code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ..runtime import ModelSpec
from ..runtime.benchmark.environment import environment
from ..runtime.benchmark.plan import Plan
from ..runtime.benchmark.plot import plot_of
from ..runtime.benchmark.rows import Row
from ..runtime.benchmark.run import Progress, RowDone, run
from ..runtime.benchmark.stage import time_stage
from ..runtime.benchmark.table import table_of
from ..runtime.errors import InvalidValue
from ..runtime.telemetry import clock
from . import host

log = logging.getLogger(__name__)

FOLDER = "resident_llm_bench"


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers from "256, 1024"; raises InvalidValue naming the widget."""
    try:
        return tuple(int(part) for part in text.replace(" ", "").split(",") if part)
    except ValueError:
        raise InvalidValue(f"{what} is {text!r}; write whole numbers such as 256, 1024.") from None


def new_file() -> str:
    """Where this benchmark's rows go: below ComfyUI's output folder, a file for each run."""
    folder = os.path.join(host.output_folder(), FOLDER)
    at = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
    return os.path.join(folder, f"bench-{at}.json")


def write(file: str, rows: Sequence[Row], stage: Row | None) -> str:
    """Write all that is known so far; return it as JSON. A full disk must not lose what was measured for minutes."""
    text = json.dumps({"environment": environment(), "rows": rows, "stage": stage}, indent=1)
    try:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file + ".part", "w", encoding="utf-8") as part:
            part.write(text)
        os.replace(file + ".part", file)
    except OSError as error:
        log.warning("The benchmark goes on, but its rows cannot be written to %s: %s", file, error)
    return text


def measure(plan: Plan, hidden: Any, *, with_stage: bool) -> tuple[str, Any, str, str]:
    """(table, plot as an IMAGE, all figures as JSON, the file that holds them); rows are written as they come."""
    file, rows = new_file(), []
    with host.using(hidden, plan.specs), host.translated_errors():
        bar = host.progress_bar(hidden, plan.num_runs)
        with contextlib.closing(run(plan, host.runtime())) as benchmarking:
            for event in benchmarking:
                host.check_interrupt()
                if isinstance(event, Progress):
                    bar.update_absolute(event.done, event.total)
                elif isinstance(event, RowDone):
                    rows.append(event.row)
                    write(file, rows, None)
        stage = _stage(next(plan.cells()).specs[0]) if with_stage else None
    return table_of(rows), host.image_of(plot_of(rows)), write(file, rows, stage), file


def _stage(spec: ModelSpec) -> Row:
    """What a Generate Text stage of the first model costs the graph; `node_s` is all of it as ComfyUI sees it."""
    began = clock()
    staging = time_stage(host.runtime(), spec)
    with contextlib.closing(staging):
        while True:
            try:
                next(staging)
            except StopIteration as end:
                return {**end.value, "node_s": clock() - began}
            host.check_interrupt()
