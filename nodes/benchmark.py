"""LLM Benchmark: measure models inside a graph; a table, a plot and all figures come out."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from datetime import datetime, timezone

from comfy_api.latest import io

from ..runtime import ModelSpec
from ..runtime.benchmark.environment import environment
from ..runtime.benchmark.plan import Plan
from ..runtime.benchmark.plot import plot_of
from ..runtime.benchmark.rows import Row
from ..runtime.benchmark.run import Progress, RowDone, run
from ..runtime.benchmark.stage import time_stage
from ..runtime.benchmark.table import table_of
from ..runtime.telemetry import clock
from . import host
from .schema import advanced, schema
from .types import LLM

log = logging.getLogger(__name__)

FOLDER = "resident_llm_bench"


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers from "256, 1024"; raises ValueError naming the widget."""
    try:
        return tuple(int(part) for part in text.replace(" ", "").split(",") if part)
    except ValueError:
        raise ValueError(f"{what} is {text!r}; write whole numbers such as 256, 1024.") from None


def new_file() -> str:
    """Where this benchmark's rows go: below ComfyUI's output folder, a file for each run."""
    folder = os.path.join(host.output_folder(), FOLDER)
    os.makedirs(folder, exist_ok=True)
    at = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
    return os.path.join(folder, f"bench-{at}.json")


def write(file: str, rows: Sequence[Row], stage: Row | None) -> str:
    """Write all that is known so far; return it as JSON. A full disk must not lose what was measured for minutes."""
    text = json.dumps({"environment": environment(), "rows": rows, "stage": stage}, indent=1)
    try:
        with open(file + ".part", "w", encoding="utf-8") as part:
            part.write(text)
        os.replace(file + ".part", file)
    except OSError as error:
        log.warning("The benchmark goes on, but its rows cannot be written to %s: %s", file, error)
    return text


class Benchmark(io.ComfyNode):
    """Rows for one model or a list of them, measured in turn."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentBenchmark",
            display_name="LLM Benchmark",
            description="Measure language models side by side: time to the first token, tokens per second, memory, "
            "and how near the hardware's limit they come.",
            search_aliases=["benchmark", "tok/s", "throughput", "speed"],
            is_input_list=True,
            is_output_node=True,
            hidden=list(host.HIDDEN),
            inputs=[
                LLM.Input("llm", tooltip="One model, or a list of them: they take turns, so that ratios are fair."),
                LLM.Input("llm_2", optional=True, tooltip="Another model to measure side by side."),
                LLM.Input("llm_3", optional=True, tooltip="Another model to measure side by side."),
                LLM.Input("llm_4", optional=True, tooltip="Another model to measure side by side."),
                io.String.Input(
                    "contexts", default="256, 1024", tooltip="Prompt lengths in tokens, exactly, separated by commas."
                ),
                io.Int.Input(
                    "output_tokens", default=32, min=4, max=4096, tooltip="Tokens that each answer has, exactly."
                ),
                io.Int.Input("repeats", default=3, min=1, max=100, tooltip="Counted runs of each row."),
                io.Int.Input("warmup", default=1, min=0, max=10, tooltip="Runs before them that are not counted."),
                io.String.Input("batch_sizes", default="1", tooltip="Requests at once, separated by commas."),
                io.String.Input(
                    "kv_caches",
                    default="auto",
                    tooltip="Precisions of the KV cache, separated by commas: auto, fp16, q8, q6, q4. Quantised ones "
                    "need ExLlamaV2 or llama.cpp.",
                ),
                io.Boolean.Input(
                    "check",
                    default=False,
                    tooltip="Check each model before its rows count: greedy text against a manual loop, KV bytes, "
                    "attention kernel. What cannot be checked says so.",
                ),
                advanced(
                    io.Boolean.Input(
                        "with_stage",
                        default=True,
                        tooltip="Also time a Generate Text stage as ComfyUI runs it: load, engine, eviction, return.",
                    )
                ),
            ],
            outputs=[
                io.String.Output("table", display_name="table", tooltip="The rows as text."),
                io.Image.Output("plot", display_name="plot", tooltip="Decode rate over prompt length."),
                io.String.Output("rows", display_name="rows", tooltip="JSON: all figures and the environment."),
            ],
        )

    @classmethod
    def execute(
        cls,
        llm: list[ModelSpec],
        contexts: list[str],
        output_tokens: list[int],
        repeats: list[int],
        warmup: list[int],
        batch_sizes: list[str],
        kv_caches: list[str],
        check: list[bool],
        with_stage: list[bool],
        llm_2: Sequence[ModelSpec] = (),
        llm_3: Sequence[ModelSpec] = (),
        llm_4: Sequence[ModelSpec] = (),
    ) -> io.NodeOutput:
        specs = tuple(one for one in (*llm, *llm_2, *llm_3, *llm_4) if one is not None)
        plan = Plan(
            specs=specs,
            contexts=numbers(contexts[0], "contexts"),
            output_tokens=output_tokens[0],
            repeats=repeats[0],
            warmup=warmup[0],
            batch_sizes=numbers(batch_sizes[0], "batch_sizes"),
            kv_caches=tuple(part.strip() for part in kv_caches[0].split(",") if part.strip()),
            has_checks=check[0],
        )
        file, rows = new_file(), []
        with host.using(cls.hidden, specs), host.translated_errors():
            bar = host.progress_bar(cls.hidden, plan.num_runs)
            with contextlib.closing(run(plan, host.runtime())) as benchmarking:
                for event in benchmarking:
                    host.check_interrupt()
                    if isinstance(event, Progress):
                        bar.update_absolute(event.done, event.total)
                    elif isinstance(event, RowDone):
                        rows.append(event.row)
                        write(file, rows, None)
            stage = _stage(next(plan.cells()).specs[0]) if with_stage[0] else None
        text = write(file, rows, stage)
        table = table_of(rows)
        return io.NodeOutput(table, host.image_of(plot_of(rows)), text, ui={"text": [table], "file": [file]})


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
