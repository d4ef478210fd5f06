"""LLM Sampling: how the next token is drawn."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime import Sampling
from .schema import advanced, schema
from .types import SAMPLING


class LLMSampling(io.ComfyNode):
    """A Sampling from widgets. The defaults are a common choice for prompt writing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentSampling",
            display_name="LLM Sampling",
            description="How the next token is drawn. Without this node: the model's own distribution.",
            search_aliases=["temperature", "top_p", "top_k", "min_p"],
            inputs=[
                io.Float.Input(
                    "temperature",
                    default=0.7,
                    min=0.0,
                    max=5.0,
                    step=0.05,
                    round=0.001,
                    tooltip="0 always takes the likeliest token; 1 is the model's own distribution; more is wilder.",
                ),
                io.Float.Input(
                    "top_p",
                    default=0.95,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    round=0.001,
                    tooltip="Only the likeliest tokens that together have this probability. 1 is off.",
                ),
                advanced(
                    io.Int.Input(
                        "top_k",
                        default=0,
                        min=0,
                        max=100000,
                        tooltip="Only this many of the likeliest tokens. 0 is off.",
                    )
                ),
                advanced(
                    io.Float.Input(
                        "min_p",
                        default=0.0,
                        min=0.0,
                        max=1.0,
                        step=0.01,
                        round=0.001,
                        tooltip="Only tokens at least this likely, relative to the likeliest one. 0 is off.",
                    )
                ),
                io.Float.Input(
                    "repetition_penalty",
                    default=1.0,
                    min=0.1,
                    max=2.0,
                    step=0.01,
                    round=0.001,
                    tooltip="Above 1 makes tokens of the prompt and the answer less likely to come again. 1 is off.",
                ),
            ],
            outputs=[SAMPLING.Output("sampling", display_name="sampling", tooltip="The settings, for Generate Text.")],
        )

    @classmethod
    def execute(
        cls, temperature: float, top_p: float, top_k: int, min_p: float, repetition_penalty: float
    ) -> io.NodeOutput:
        return io.NodeOutput(
            Sampling(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
            )
        )
