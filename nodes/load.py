"""Load LLM: a recipe for a model. Nothing is loaded until a generator runs."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any, get_args

from comfy_api.latest import io

from ..runtime import ModelSpec
from ..runtime.engines import ENGINES, choose
from ..runtime.errors import ModelNotFound, ResidentError
from ..runtime.request import WhenIdle
from . import host, models
from .schema import advanced, schema
from .types import LLM

NO_MODEL = "(no model found)"


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


def model_path(name: str) -> str:
    """The real path of a model of the menu; raises ModelNotFound with a sentence that tells where to put one."""
    found = models.listing(host.llm_folders())
    if name in found.models:
        return os.path.realpath(found.models[name])
    where = " or ".join(host.llm_folders())
    if not found.models:
        from ..runtime.models.suggestions import advice  # only for this sentence

        raise ModelNotFound(
            f"There is no language model in {where}. Put a model folder (config.json and safetensors) or "
            f"a GGUF file there, then refresh the page. {advice(host.card_bytes())}"
        )
    there = ", ".join(list(found.models)[:5]) + (" ..." if len(found.models) > 5 else "")
    if name in found.folders:
        raise ModelNotFound(
            f"The folder {name!r} holds no model: neither config.json nor safetensors nor GGUF. There are: {there}."
        )
    raise ModelNotFound(
        f"The model {name!r} is not in {where}. There are: {there}. Pick one of them, or put it there and "
        "refresh the page."
    )


def settled(spec: ModelSpec) -> ModelSpec:
    """The spec with the engine that "auto" means here, so that it shares its model with one that names the engine.

    A model that nothing here can run stays as it is: Generate Text, which needs it, says why.
    """
    try:
        return replace(spec, engine=choose(spec).name)
    except ResidentError:
        return spec


class LoadLLM(io.ComfyNode):
    """Hand out a ModelSpec; equal ones share one loaded model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = list(models.listing(host.llm_folders()).models) or [NO_MODEL]
        engines, engine_tooltip = engine_menu()
        return schema(
            node_id="ResidentLoadLLM",
            display_name="Load LLM",
            description="Choose a language model. It is loaded when text is first generated, and stays loaded.",
            search_aliases=["llm", "language model", "load model", "gguf", "transformers"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=names,
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
            outputs=[
                LLM.Output(
                    "llm",
                    display_name="llm",
                    tooltip="The choice of model, for Generate Text. It costs nothing to pass on.",
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, model: str | None) -> bool | str:
        """The menu may have changed since the page was loaded; a wired name arrives as None."""
        if model is None:
            return True
        try:
            model_path(model)
        except ModelNotFound as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model: str | None = None, **_: Any) -> str:
        host.begin_prompt()
        return models.revision(model_path(model)) if model else ""

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
        path = model_path(model)
        spec = ModelSpec(
            model=path,
            revision=models.revision(path),
            engine=engine,
            device=host.settle_device(device),
            dtype=dtype,
            attention=attention,
            context_len=context_len or None,
            kv_cache=kv_cache,
            options=() if sums == "auto" else (("sums", sums),),
            when_idle=when_idle,
            host_copy_bytes=None if host_copy_gb < 0 else int(host_copy_gb * 1e9),
        )
        return io.NodeOutput(settled(spec))
