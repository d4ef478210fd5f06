"""LLM Prompt: what the model is told."""

from __future__ import annotations

import os
from typing import Any, get_args

from comfy_api.latest import io

from ..runtime import ModelSpec, Prompt
from ..runtime.prompting import conversation, presets
from ..runtime.prompting.conversation import CLEANING, NO_PRESET, OWN_TEMPLATE
from ..runtime.request import Thinking
from . import host
from .schema import advanced, schema
from .types import LLM, PROMPT, require, require_model


def preset_menu() -> tuple[list[str], str]:
    """The ids of all presets, and a tooltip that says what each does and which cleaning rules it brings."""
    folders = host.user_folders("presets")
    ids = list(presets.find(folders))
    lines = ["A ready system text; `system` is added behind it."]
    for preset_id in ids:
        try:
            one = presets.load(preset_id, folders)
            lines.append(f"{preset_id}: {one.about} Cleans: {', '.join(one.clean) or 'nothing'}.")
        except ValueError as error:
            lines.append(str(error))
    return [NO_PRESET, *ids], "\n".join(lines)


class LLMPrompt(io.ComfyNode):
    """Messages, with how to answer them; what was said before comes in by a socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        ids, about = preset_menu()
        templates = conversation.template_choices(host.user_folders("templates"))
        return schema(
            node_id="ResidentPrompt",
            display_name="LLM Prompt",
            description="What the model is told; the model's own chat template is put around it. For several turns, "
            "wire the earlier LLM Prompt into `history` and its answer into `history_answer`.",
            search_aliases=["chat", "system prompt", "instruction", "preset", "conversation"],
            inputs=[
                io.String.Input(
                    "system",
                    multiline=True,
                    default="",
                    dynamic_prompts=False,
                    placeholder="system: who the model is and how it should answer",
                    tooltip="The system message. Empty: the preset's, or that of the history, or none.",
                ),
                io.String.Input(
                    "user",
                    multiline=True,
                    default="",
                    dynamic_prompts=False,
                    placeholder="user: what you want",
                    tooltip="The user message. Braces, brackets and control tokens are passed on as plain characters.",
                ),
                io.Combo.Input("preset", options=ids, default=NO_PRESET, optional=True, tooltip=about),
                io.Combo.Input(
                    "thinking",
                    options=list(get_args(Thinking)),
                    default="auto",
                    optional=True,
                    tooltip="Whether the model thinks first, if it can. auto is what the model was made for.",
                ),
                advanced(
                    io.String.Input(
                        "answer_prefix",
                        default="",
                        optional=True,
                        tooltip="How the answer begins: the model goes on from here. It is not repeated in the text.",
                    )
                ),
                advanced(
                    io.String.Input(
                        "stop_strings",
                        multiline=True,
                        default="",
                        optional=True,
                        dynamic_prompts=False,
                        placeholder="stop strings, one per line",
                        tooltip="The answer ends before any of these. One per line; \\n and \\t are line end and tab. "
                        "The model's own end tokens always end it.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "clean",
                        options=list(CLEANING),
                        default="preset",
                        optional=True,
                        tooltip="Cleaning of the answer: by the preset's rules, off, or text "
                        f"({', '.join(conversation.TEXT_RULES)}). The report names what was changed and has the raw "
                        "text.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "template",
                        options=templates,
                        default=OWN_TEMPLATE,
                        optional=True,
                        tooltip="The chat template: auto is the model's own. Your own .jinja files go into "
                        "user/__resident_llm/templates.",
                    )
                ),
                advanced(
                    io.Boolean.Input(
                        "fold_system",
                        default=False,
                        optional=True,
                        tooltip="If the chat template takes no system message, begin the first user message with it.",
                    )
                ),
                advanced(
                    io.Boolean.Input(
                        "drop_history",
                        default=False,
                        optional=True,
                        tooltip="If the prompt is too long, leave out the oldest turns; the report says how many.",
                    )
                ),
                advanced(
                    io.String.Input(
                        "thinking_tags",
                        default="",
                        optional=True,
                        tooltip="The tags around thinking, such as <think> </think>. Empty: found from the model.",
                    )
                ),
                PROMPT.Input("history", optional=True, tooltip="An earlier LLM Prompt that this one goes on from."),
                io.String.Input(
                    "history_answer",
                    optional=True,
                    force_input=True,
                    tooltip="What the model answered to the history: the text of Generate Text.",
                ),
                LLM.Input(
                    "llm",
                    optional=True,
                    tooltip="Only to fill `rendered` and `num_tokens`: the tokenizer is read, no weights are loaded.",
                ),
            ],
            outputs=[
                PROMPT.Output(
                    "prompt", display_name="prompt", tooltip="The messages, for Generate Text or for `history`."
                ),
                io.String.Output(
                    "rendered",
                    display_name="rendered",
                    tooltip="The exact text that the model reads, control tokens visible. Empty unless llm is wired.",
                ),
                io.Int.Output(
                    "num_tokens",
                    display_name="num_tokens",
                    tooltip="Tokens of the prompt. 0 unless llm is wired, or where only a server can count.",
                ),
            ],
        )

    @classmethod
    def validate_inputs(cls, preset: str | None = None, template: str | None = None) -> bool | str:
        """The menus may have changed since the page was loaded; what is wired arrives as None."""
        try:
            if preset is not None:
                require("preset", [preset], (str,), "a preset's name")
            if preset not in (None, NO_PRESET):
                presets.load(preset, host.user_folders("presets"))
            if template is not None:
                require("template", [template], (str,), "a template's name")
                conversation.template_of(template, host.user_folders("templates"))
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, preset: str | None = None, template: str | None = None, **_: Any) -> list[float]:
        """The times of the files that the choices stand for."""
        files = presets.find(host.user_folders("presets")) | conversation.template_files(host.user_folders("templates"))
        return [os.stat(files[one]).st_mtime for one in (preset, template) if isinstance(one, str) and one in files]

    @classmethod
    def execute(
        cls,
        system: str,
        user: str,
        preset: str = NO_PRESET,
        thinking: Thinking = "auto",
        answer_prefix: str = "",
        stop_strings: str = "",
        clean: str = "preset",
        template: str = OWN_TEMPLATE,
        fold_system: bool = False,
        drop_history: bool = False,
        thinking_tags: str = "",
        history: Prompt | None = None,
        history_answer: str = "",
        llm: ModelSpec | None = None,
    ) -> io.NodeOutput:
        if llm is not None:
            require_model("llm", [llm])
        if history is not None:
            require("history", [history], (Prompt,), "an earlier LLM Prompt")
        require("preset", [preset], (str,), "a preset's name")
        require("template", [template], (str,), "a template's name")
        prompt = conversation.compose(
            system=system,
            user=user,
            preset=None if preset == NO_PRESET else presets.load(preset, host.user_folders("presets")),
            history=() if history is None else conversation.continued(history, history_answer),
            cleaning=clean,
            thinking=thinking,
            thinking_tags=thinking_tags,
            stop_strings=stop_strings,
            answer_prefix=answer_prefix,
            template=conversation.template_of(template, host.user_folders("templates")),
            fold_system=fold_system,
            drop_history=drop_history,
        )
        encoded = conversation.preview(llm, prompt) if llm is not None else None
        if encoded is None:
            return io.NodeOutput(prompt, "", 0)
        return io.NodeOutput(prompt, encoded.text, encoded.num_tokens)
