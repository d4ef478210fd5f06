"""Load LLM: a recipe for a model. Nothing is loaded until a generator runs."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, get_args

from comfy_api.latest import io

from ..runtime import ModelSpec
from ..runtime.engines import ENGINES
from ..runtime.errors import InvalidValue
from ..runtime.request import WhenIdle
from . import host, menu
from .schema import advanced, schema
from .types import llm_output


def _shows(engine: str) -> bool:
    """Engines without a file format are not for models of the menu, except the one for tests when asked for."""
    return engine == "scripted" and os.environ.get("RESIDENT_LLM_SCRIPTED") == "1"


@functools.cache
def engine_menu() -> tuple[list[str], str]:
    """The engines by name, and a tooltip that says which of them cannot run here, and why."""
    rows = [row for row in ENGINES if row.formats or _shows(row.name)]
    lines = ["What runs the model; auto picks one that fits its format."]
    for row in rows:
        reason = row.why_unavailable()
        lines.append(f"{row.name}: cannot run here: {reason}" if reason else f"{row.name}: {row.title}")
    return ["auto", *(row.name for row in rows)], "\n".join(lines)


def host_copy_bytes(gigabytes: float) -> int | None:
    """The widget as bytes, None for -1; raises InvalidValue for what is no size, as a wired number may be."""
    if gigabytes == -1:
        return None
    if not (math.isfinite(gigabytes) and gigabytes >= 0):
        raise InvalidValue(
            f"host_copy_gb is {gigabytes}; it is a size in GB, 0 for off, or -1 for a quarter of what is free."
        )
    return int(gigabytes * 1e9)


class LoadLLM(io.ComfyNode):
    """Hand out a ModelSpec; equal ones share one loaded model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        engines, engine_tooltip = engine_menu()
        return schema(
            node_id="ResidentLoadLLM",
            display_name="Load LLM",
            description="Choose a language model. It is loaded when text is first generated, and stays loaded.",
            search_aliases=["llm", "language model", "load model", "gguf", "transformers"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=menu.names() or [menu.NO_MODEL],
                    tooltip="A model from the LLM folders: a folder with config.json and safetensors, or a GGUF file. "
                    "Refresh the page after adding one.",
                ),
                io.Combo.Input("engine", options=engines, default="auto", tooltip=engine_tooltip),
                advanced(
                    io.Combo.Input(
                        "device",
                        options=host.devices(),
                        default="auto",
                        tooltip="Where the model runs; auto is ComfyUI's own device.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "dtype",
                        options=["auto", "bfloat16", "float16", "float32"],
                        default="auto",
                        tooltip="Precision of the weights; auto is what the model was saved in, if the device can "
                        "compute in it.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "attention",
                        options=["auto", "sdpa", "flash_attention_2", "eager"],
                        default="auto",
                        tooltip="Attention kernel; the report says which one really ran.",
                    )
                ),
                io.Int.Input(
                    "context_len",
                    default=0,
                    min=0,
                    max=2**24,
                    tooltip="Most tokens of prompt and answer together; 0 is what the model was made for. "
                    "Less needs less memory.",
                ),
                advanced(
                    io.Combo.Input(
                        "kv_cache",
                        options=["auto", "fp16", "q8", "q6", "q4"],
                        default="auto",
                        tooltip="Precision of the KV cache, for engines that can quantise it; less needs less memory.",
                    )
                ),
                io.Combo.Input(
                    "when_idle",
                    options=list(get_args(WhenIdle)),
                    default="keep",
                    tooltip="After a run: keep the model loaded until the memory is needed, release it at once, or "
                    "put a server's model to sleep.",
                ),
                advanced(
                    io.Float.Input(
                        "host_copy_gb",
                        optional=True,
                        default=-1,
                        min=-1,
                        max=4096,
                        step=0.5,
                        tooltip="System memory in GB that the weights may wait in when an image model needs the GPU; "
                        "they come back from there much faster than from disk. -1 is a quarter of what is free, "
                        "0 is off.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "sums",
                        optional=True,
                        options=["auto", "full", "reduced"],
                        default="auto",
                        tooltip="How 16-bit matrix products add up on a GPU with transformers: full is exact and may "
                        "be slower, auto leaves what ComfyUI has set. Only this model is touched.",
                    )
                ),
            ],
            outputs=[llm_output()],
        )

    @classmethod
    def validate_inputs(cls, model: str | None = None) -> bool | str:
        return menu.check(model)

    @classmethod
    def fingerprint_inputs(cls, model: str | None = None, **_: Any) -> str:
        return menu.fingerprint(model)

    @classmethod
    def execute(
        cls,
        model: str,
        engine: str,
        device: str,
        dtype: str,
        attention: str,
        context_len: int,
        kv_cache: str,
        when_idle: WhenIdle,
        host_copy_gb: float = -1,
        sums: str = "auto",
    ) -> io.NodeOutput:
        path = menu.path_of(model)
        spec = ModelSpec(
            model=path,
            revision=menu.revision(path),
            engine=engine,
            device=host.settle_device(device),
            dtype=dtype,
            attention=attention,
            context_len=context_len or None,
            kv_cache=kv_cache,
            options=() if sums == "auto" else (("sums", sums),),
            when_idle=when_idle,
            host_copy_bytes=host_copy_bytes(host_copy_gb),
        )
        return io.NodeOutput(spec)
