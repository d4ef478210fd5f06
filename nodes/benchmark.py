"""LLM Benchmark: measure models inside a graph; a table, a plot and all figures come out."""

from __future__ import annotations

from collections.abc import Sequence

from comfy_api.latest import io

from ..runtime import ModelSpec
from . import host
from .schema import advanced, schema
from .types import LLM, require_model


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
                *(
                    LLM.Input(name, optional=True, tooltip="Another model to measure side by side.")
                    for name in ("llm_2", "llm_3", "llm_4")
                ),
                io.String.Input(
                    "contexts", default="256, 1024", tooltip="Prompt lengths in tokens, exactly, separated by commas."
                ),
                io.Int.Input(
                    "output_tokens", default=32, min=4, max=4096, tooltip="Tokens that each answer has, exactly."
                ),
                io.Int.Input("repeats", default=3, min=1, max=100, tooltip="Counted runs of each row."),
                advanced(
                    io.Int.Input("warmup", default=1, min=0, max=10, tooltip="Runs before them that are not counted.")
                ),
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
        for name, wired in (("llm", llm), ("llm_2", llm_2), ("llm_3", llm_3), ("llm_4", llm_4)):
            require_model(name, [one for one in wired if one is not None])
        from ..runtime.benchmark.plan import Plan  # loaded when a benchmark runs, not when ComfyUI starts
        from .benchmark_run import measure, numbers

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
        table, plot, rows, file = measure(plan, cls.hidden, with_stage=with_stage[0])
        return io.NodeOutput(table, plot, rows, ui={"text": [table], "file": [file]})
