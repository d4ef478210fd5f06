"""Free LLM Memory: unload models at a chosen place in the graph."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime import ModelSpec
from ..runtime.telemetry import format_bytes
from . import host
from .schema import schema
from .types import LLM

ANY = io.Custom(host.ANY_TYPE)


class Free(io.ComfyNode):
    """Unload one model or all, and pass a value on, so that the graph says when."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentFree",
            display_name="Free LLM Memory",
            description="Unload language models once the wired value is there. Usually not needed: a model steps "
            "aside by itself when an image model needs the memory.",
            search_aliases=["unload", "vram", "free memory"],
            is_output_node=True,
            inputs=[
                ANY.Input(
                    "value",
                    optional=True,
                    tooltip="Anything; it is passed on unchanged, and memory is freed once it is there.",
                ),
                LLM.Input("llm", optional=True, tooltip="Only this model is unloaded. Not wired: all of them."),
            ],
            outputs=[
                ANY.Output("passed_on", display_name="passed_on", tooltip="The wired value."),
                io.String.Output("freed", display_name="freed", tooltip="What was freed, in a sentence."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float | str:
        """Standing alone it runs each time; with a wired value it runs when that has changed."""
        return "" if "value" in inputs else float("nan")

    @classmethod
    def execute(cls, value: Any = None, llm: ModelSpec | None = None) -> io.NodeOutput:
        runtime = host.runtime()
        num_models = len(runtime.residents())
        num_bytes = runtime.unload(llm)
        num_models -= len(runtime.residents())
        freed = f"{num_models} unloaded, {format_bytes(num_bytes)} freed" if num_models else "nothing was loaded"
        return io.NodeOutput(value, freed, ui={"text": [freed]})
