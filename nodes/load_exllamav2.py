"""Load LLM (ExLlamaV2): the same recipe as Load LLM gives, with what only this engine knows."""

from __future__ import annotations

from typing import Any, get_args

from comfy_api.latest import io

from ..runtime import ModelSpec
from ..runtime.engines import row
from ..runtime.errors import EngineUnavailable
from ..runtime.request import Option, WhenIdle
from . import menu
from .schema import advanced, schema
from .types import llm_output

NO_DRAFT, NGRAM = "(off)", "(n-grams of the text)"


def why_unavailable() -> str | None:
    """Why the engine cannot run on this machine."""
    return row("exllamav2").why_unavailable()


def draft_model(draft: str | None) -> str | None:
    """The model of the menu that drafts; None where none does, or where it is not known yet."""
    return None if draft in (NO_DRAFT, NGRAM) else draft


def lora_lines(text: str) -> str:
    """The `loras` option: the names of the text as paths, strengths kept; raises ModelNotFound."""
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, at, strength = line.rpartition("@")
        lines.append(f"{menu.path_of(name.strip())} @ {strength.strip()}" if at else menu.path_of(line))
    return "\n".join(lines)


class LoadExLlamaV2(io.ComfyNode):
    """Hand out a ModelSpec for ExLlamaV2."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = menu.names(with_gguf=False)
        reason = why_unavailable()
        return schema(
            node_id="ResidentLoadExLlamaV2",
            display_name="Load LLM (ExLlamaV2)",
            description="Choose a model for ExLlamaV2: EXL2, GPTQ, AWQ (repacked once, without loss) or 16 bit.",
            search_aliases=["llm", "exllama", "exl2", "awq", "gptq", "load model"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=names or [menu.NO_MODEL],
                    tooltip="A model folder from the LLM folders: EXL2, GPTQ 4-bit, AWQ 4-bit or 16-bit safetensors. "
                    "AWQ is repacked into a cache folder the first time."
                    + (f" Cannot run here: {reason}" if reason else ""),
                ),
                io.Int.Input(
                    "context_len",
                    default=8192,
                    min=0,
                    max=2**24,
                    tooltip="Most tokens of prompt and answer together; the KV cache for them is allocated at load. "
                    "0 is what the model was made for. A list shares it: short ones run at once.",
                ),
                io.Combo.Input(
                    "kv_cache",
                    options=["fp16", "q8", "q6", "q4"],
                    default="fp16",
                    tooltip="Precision of the KV cache. q8, q6 and q4 save memory, not time: with a 27B model and 32k "
                    "tokens of context on an H200, fp16 made 74 tokens a second, q8 44 and q4 44; with 512 tokens 92, "
                    "86 and 85.",
                ),
                io.Combo.Input(
                    "draft",
                    options=[NO_DRAFT, NGRAM, *names],
                    default=NO_DRAFT,
                    tooltip="Guess tokens ahead and check them together. N-grams need no memory and suit text that "
                    "repeats its prompt; a small model of the same family needs its own memory. The text stays the "
                    "same; the report counts guessed and accepted tokens.",
                ),
                advanced(
                    io.Int.Input(
                        "num_draft_tokens", default=4, min=1, max=7, tooltip="Tokens guessed ahead, where draft is on."
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "attention",
                        options=["auto", "flash_attention_2", "sdpa", "eager"],
                        default="auto",
                        tooltip="auto takes flash-attn where it is installed and computes right: only with it a list "
                        "runs at once. sdpa and eager run one prompt at a time.",
                    )
                ),
                advanced(
                    io.Int.Input(
                        "max_batch", default=8, min=1, max=64, tooltip="Prompts of a list that are answered at once."
                    )
                ),
                advanced(
                    io.String.Input(
                        "loras",
                        default="",
                        multiline=True,
                        dynamic_prompts=False,
                        tooltip="LoRA folders (PEFT) from the LLM folders, one a line; 'name @ 0.8' sets a strength.",
                    )
                ),
                io.Combo.Input(
                    "when_idle",
                    options=[one for one in get_args(WhenIdle) if one != "sleep"],
                    default="keep",
                    tooltip="After a run: keep the model loaded until the memory is needed, or release it at once.",
                ),
            ],
            outputs=[llm_output()],
        )

    @classmethod
    def validate_inputs(cls, model: str | None = None, draft: str | None = None) -> bool | str:
        return menu.check(model, draft_model(draft))

    @classmethod
    def fingerprint_inputs(cls, model: str | None = None, draft: str | None = None, **_: Any) -> str:
        return menu.fingerprint(model, draft_model(draft))

    @classmethod
    def execute(
        cls,
        model: str,
        context_len: int,
        kv_cache: str,
        draft: str,
        num_draft_tokens: int,
        attention: str,
        max_batch: int,
        loras: str,
        when_idle: WhenIdle,
    ) -> io.NodeOutput:
        if reason := why_unavailable():
            raise EngineUnavailable(f"ExLlamaV2 cannot run here: {reason}")
        paths = [menu.path_of(name) for name in (model, draft_model(draft)) if name is not None]
        options: list[tuple[str, Option]] = [("max_batch", max_batch)]
        if draft != NO_DRAFT:
            drafted = "ngram" if draft == NGRAM else paths[1]
            options += [("draft", drafted), ("num_draft_tokens", num_draft_tokens)]
        if lines := lora_lines(loras):
            options.append(("loras", lines))
        spec = ModelSpec(
            model=paths[0],
            revision=menu.revision(*paths),
            engine="exllamav2",
            attention=attention,
            context_len=context_len or None,
            kv_cache=kv_cache,
            options=tuple(options),
            when_idle=when_idle,
        )
        return io.NodeOutput(spec)
