"""Free LLM Memory: unload models at a chosen place in the graph."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..runtime import ModelSpec, Runtime
from ..runtime.device_memory import read
from ..runtime.telemetry import format_bytes
from . import host
from .free_mark import FreeMark
from .schema import schema
from .types import ANY, LLM, passed_on, require_model

_mark = FreeMark()


def free(runtime: Runtime, spec: ModelSpec | None, *, drop_host_copies: bool) -> str:
    """Free one model or all; say in a sentence what the ledger and the device counted."""
    there = runtime.residents(spec)
    devices = sorted({one.info.device for one in there if one.bytes.device} - {"cpu"})
    before = {device: memory.free for device in devices if (memory := read(device))}
    copies = sum(one.bytes.host_copy for one in there)
    num_bytes = runtime.unload(spec) if drop_host_copies else runtime.evict(spec)
    left = runtime.residents(spec)
    busy = [one.spec.model for one in left if one.bytes.device and one.is_busy]
    num_freed = sum(bool(one.bytes.device) for one in there) - sum(bool(one.bytes.device) for one in left)
    parts = [f"{num_freed} unloaded, {format_bytes(num_bytes)} freed"] if num_freed else []
    for device, free_before in before.items():
        if memory := read(device):
            parts.append(f"{device} itself counts {format_bytes(memory.free - free_before)} more free")
    waiting = sum(one.bytes.host_copy for one in left)
    if waiting:
        parts.append(f"{format_bytes(waiting)} wait in host memory")
    elif copies:
        parts.append(f"{format_bytes(copies)} of host memory freed")
    if busy:
        parts.append(f"still in use: {', '.join(busy)}")
    return "; ".join(parts) or "nothing was loaded"


class Free(io.ComfyNode):
    """Unload one model or all, and pass a value on, so that the graph says when."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentFree",
            display_name="Free LLM Memory",
            description="Take language models off the GPU once the wired value is there. Usually not needed: a model "
            "steps aside by itself when an image model needs the memory. It also reaches models on a second GPU, "
            "which ComfyUI's own Free button may not.",
            search_aliases=["unload", "vram", "free memory"],
            is_output_node=True,
            inputs=[
                ANY.Input(
                    "value",
                    optional=True,
                    tooltip="Anything; it is passed on unchanged, and memory is freed once it is there.",
                ),
                LLM.Input("llm", optional=True, tooltip="Only this model is freed. Not wired: all of them."),
                io.Boolean.Input(
                    "drop_host_copies",
                    default=False,
                    tooltip="Also free the copies of weights that wait in system memory for a quick return. Off: only "
                    "GPU memory is freed.",
                ),
            ],
            outputs=[
                passed_on(),
                io.String.Output("freed", display_name="freed", tooltip="What was freed, in a sentence."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> int:
        """It runs again if a model was loaded since it ran, or if the wired value changed."""
        return _mark.fingerprint(host.runtime().num_loads())

    @classmethod
    def execute(cls, drop_host_copies: bool, value: Any = None, llm: ModelSpec | None = None) -> io.NodeOutput:
        if llm is not None:
            require_model("llm", [llm])
        runtime = host.runtime()
        freed = free(runtime, llm, drop_host_copies=drop_host_copies)
        _mark.freed(runtime.num_loads())
        return io.NodeOutput(value, freed, ui={"text": [freed]})
