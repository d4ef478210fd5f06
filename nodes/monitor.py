"""LLM Monitor: the state of models and devices at a place in the graph, and a picture of the prompt so far."""

from __future__ import annotations

import json
from typing import Any

from comfy_api.latest import io

from ..runtime.telemetry import clock
from . import host
from .schema import schema
from .types import ANY, passed_on


class PromptStart:
    """When the running prompt began: ComfyUI asks for all fingerprints before it runs the first node."""

    def __init__(self) -> None:
        self._prompt_id: str | None = None
        self.at = 0.0

    def note(self, prompt_id: str, now: float) -> float:
        """The start of this prompt, which is now if it was not heard of before."""
        if prompt_id != self._prompt_id:
            self._prompt_id, self.at = prompt_id, now
        return self.at


_start = PromptStart()


class Monitor(io.ComfyNode):
    """Pass a value on; tell what is loaded, and draw what the language models did in this prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentMonitor",
            display_name="LLM Monitor",
            description="What language models hold and did in this prompt, as JSON and as a picture to save. The wired "
            "value is passed on unchanged. For a live view, open LLM in the sidebar.",
            search_aliases=["vram", "memory", "gpu", "tok/s", "timeline"],
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                ANY.Input(
                    "value",
                    optional=True,
                    tooltip="Anything; it is passed on unchanged, and the state is read once it is there.",
                )
            ],
            outputs=[
                passed_on(),
                io.String.Output("state", display_name="state", tooltip="JSON: devices, models, runs."),
                io.Image.Output(
                    "timeline",
                    display_name="timeline",
                    tooltip="Loads, generations, evictions and held memory from the start of this prompt.",
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Never equal to anything: it runs each time."""
        _start.note(host.prompt_id(), clock())
        return float("nan")

    @classmethod
    def execute(cls, value: Any = None) -> io.NodeOutput:
        from ..runtime.timeline import timeline_of

        now, monitor = clock(), host.monitor()
        began = _start.note(host.prompt_id(), now)
        monitor.forget()
        marks, runs = monitor.marks(began), monitor.runs(began)
        state = {**monitor.read(after=min((run.number for run in runs), default=10**9) - 1), "samples": []}
        text = json.dumps(state)
        picture = timeline_of(began, now, marks, runs)
        return io.NodeOutput(value, text, host.image_of(picture), ui={"text": [_summary(state)]})


def _summary(state: dict[str, Any]) -> str:
    """A line for each device and model."""
    lines = []
    for one in state["devices"]:
        if one["used_bytes"] is not None:
            lines.append(f"{one['device']}: {one['used_bytes'] / 1e9:.1f} of {one['total_bytes'] / 1e9:.1f} GB used")
    for one in state["models"]:
        lines.append(f"{one['name']}: {one['bytes']['device'] / 1e9:.2f} GB, {one['engine']}, {one['attention']}")
    return "\n".join(lines)
