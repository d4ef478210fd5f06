"""Text Lines: one text becomes a list, so that all its lines are answered as one batch."""

from __future__ import annotations

from comfy_api.latest import io

from ..runtime.errors import InvalidValue
from .schema import schema


class Lines(io.ComfyNode):
    """The lines of a text as a list."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentLines",
            display_name="Text Lines",
            description="Make a list of a text, one item per line. What is wired behind it runs once per item; "
            "Generate Text answers all of them as one batch.",
            search_aliases=["split text", "batch", "list", "ideas"],
            inputs=[
                io.String.Input(
                    "text",
                    multiline=True,
                    default="",
                    dynamic_prompts=False,
                    placeholder="one item per line",
                    tooltip="One item per line; empty lines are left out.",
                ),
            ],
            outputs=[
                io.String.Output("lines", display_name="lines", is_output_list=True, tooltip="The lines, as a list."),
            ],
        )

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise InvalidValue("Text Lines has no line to pass on. Write at least one into `text`.")
        return io.NodeOutput(lines)
