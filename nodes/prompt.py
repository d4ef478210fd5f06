"""LLM Prompt: what the model is told."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime import Prompt
from .schema import schema
from .types import PROMPT


class LLMPrompt(io.ComfyNode):
    """A system and a user message."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentPrompt",
            display_name="LLM Prompt",
            description="What the model is told; the model's own chat template is put around it.",
            search_aliases=["chat", "system prompt", "instruction"],
            inputs=[
                io.String.Input(
                    "system",
                    multiline=True,
                    default="",
                    dynamic_prompts=False,
                    placeholder="system: who the model is and how it should answer",
                    tooltip="The system message. Empty: the model gets none from you.",
                ),
                io.String.Input(
                    "user",
                    multiline=True,
                    default="",
                    dynamic_prompts=False,
                    placeholder="user: what you want",
                    tooltip="The user message. Braces and brackets are passed on as typed.",
                ),
            ],
            outputs=[PROMPT.Output("prompt", display_name="prompt", tooltip="The messages, for Generate Text.")],
        )

    @classmethod
    def execute(cls, system: str, user: str) -> io.NodeOutput:
        return io.NodeOutput(Prompt.of(user, system=system))
