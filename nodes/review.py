"""Review Text: look at a text in the middle of a graph, change it, and pass the changed one on."""

from __future__ import annotations

import hashlib

from comfy_api.latest import io

from .schema import advanced, schema


def mark_of(text: str) -> str:
    """A short mark of a text: an edit remembers by it which text it is an edit of."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def passed_on(text: str, edited: str, hold: bool, edit_of: str) -> str:
    """The edited text, if it is held or is an edit of this very text; else the text itself."""
    is_of_this = not edit_of or edit_of == mark_of(text)
    return edited if edited and (hold or is_of_this) else text


class Review(io.ComfyNode):
    """A text that passes through, or an edited one in its place."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentReview",
            display_name="Review Text",
            description="Show a text before it is used, and let it be changed. Write the better text into `edited` "
            "and run again: only what comes behind this node runs anew.",
            search_aliases=["edit text", "approve", "show text", "hold"],
            is_output_node=True,
            inputs=[
                io.String.Input(
                    "text", force_input=True, tooltip="The text to look at, such as that of Generate Text."
                ),
                io.String.Input(
                    "edited",
                    multiline=True,
                    default="",
                    dynamic_prompts=False,
                    placeholder="edited text; empty passes the text on as it is",
                    tooltip="What is passed on in place of the text. Empty: the text as it is.",
                ),
                io.Boolean.Input(
                    "hold",
                    default=False,
                    tooltip="On: the edited text is passed on whatever comes in. Off: an edit counts for the text that "
                    "it was made of, and a new text passes through.",
                ),
                advanced(
                    io.String.Input(
                        "edit_of",
                        default="",
                        tooltip="Which text the edit was made of, as a mark; the page fills it in. Empty: any.",
                    )
                ),
            ],
            outputs=[
                io.String.Output("passed_on", display_name="text", tooltip="The edited text, or the text as it came."),
            ],
        )

    @classmethod
    def execute(cls, text: str, edited: str, hold: bool, edit_of: str = "") -> io.NodeOutput:
        result = passed_on(text, edited, hold, edit_of)
        return io.NodeOutput(result, ui={"text": [text], "passed_on": [result], "mark": [mark_of(text)]})
