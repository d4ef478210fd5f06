"""Generate Text: prompts in, text out, live on the node."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

from comfy_api.latest import io

from ..runtime import Collector, ModelSpec, Prompt, Request, ResidentError, Result, Sampling, results_of
from ..runtime.errors import InvalidValue
from ..runtime.request import MAX_SEED, OnCutThinking
from . import host
from .live import Live
from .schema import advanced, schema
from .types import LLM, PROMPT, SAMPLING, require, require_model

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One element of the batch: what to ask, and which model."""

    spec: ModelSpec
    request: Request


def items_of(
    specs: Sequence[ModelSpec],
    prompts: Sequence[Prompt | str],
    seeds: Sequence[int],
    max_tokens: Sequence[int],
    samplings: Sequence[Sampling],
    thinking_budgets: Sequence[int],
    on_cut_thinking: Sequence[OnCutThinking],
) -> list[Item]:
    """One item per element of the longest list; shorter lists repeat their last, a single seed counts up.

    Raises InvalidValue, naming the item, for values that cannot be.
    """
    if not (specs and prompts):
        return []
    require_model("llm", specs)
    require("prompt", prompts, (Prompt, str), "an LLM Prompt or a text")
    require("sampling", samplings, (Sampling,), "LLM Sampling, or nothing")
    lists = (specs, prompts, seeds, max_tokens, samplings, thinking_budgets, on_cut_thinking)
    names = ("llm", "prompt", "seed", "max_tokens", "sampling", "thinking_budget", "on_cut_thinking")
    if empty := [name for name, values in zip(names, lists) if not values]:
        raise InvalidValue(
            f"{', '.join(empty)} is wired to a list without items. Wire in one item at least, or nothing."
        )
    total = max(map(len, lists))
    items = []
    for i in range(total):
        prompt = _at(prompts, i)
        try:
            request = Request(
                prompt=Prompt.of(prompt) if isinstance(prompt, str) else prompt,
                sampling=_at(samplings, i),
                max_tokens=_at(max_tokens, i) or None,
                seed=(seeds[0] + i) % (MAX_SEED + 1) if len(seeds) == 1 else _at(seeds, i),
                thinking_budget=_at(thinking_budgets, i) or None,
                on_cut_thinking=_at(on_cut_thinking, i),
            )
        except ValueError as error:
            raise InvalidValue(f"Item {i + 1} of {total}: {error}" if total > 1 else str(error)) from error
        items.append(Item(spec=_at(specs, i), request=request))
    return items


def _at(values: Sequence[T], index: int) -> T:
    return values[min(index, len(values) - 1)]


def answer(items: Sequence[Item], live: Live) -> list[Result]:
    """One result per item, in order; neighbours with the same model are one batch.

    A failing item leaves the others alone; then its error is raised, saying which it was.
    """
    outcomes: list[Result | ResidentError] = []
    for spec, group in itertools.groupby(items, key=lambda item: item.spec):
        requests = [item.request for item in group]
        collector = Collector(spec, requests)
        events = host.watch(host.runtime().generate(spec, requests), live.begin_at(len(outcomes)))
        try:
            with contextlib.closing(events):
                outcomes += collector.outcomes(*collector.drain(events))
        except ResidentError as error:
            outcomes += [error] * len(requests)
    return results_of(outcomes)


class Generate(io.ComfyNode):
    """Answer a prompt, or a list of them as one batch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="ResidentGenerate",
            display_name="Generate Text",
            description="Let a language model answer. The text grows on the node while it is written.",
            search_aliases=["llm", "text generation", "prompt expansion", "chat", "caption"],
            is_input_list=True,
            is_output_node=True,
            hidden=list(host.HIDDEN),
            inputs=[
                LLM.Input("llm", tooltip="The model, from Load LLM."),
                io.MultiType.Input(
                    "prompt",
                    types=[PROMPT, io.String],
                    tooltip="What to answer: an LLM Prompt, or any text. A list is answered as one batch.",
                ),
                SAMPLING.Input(
                    "sampling",
                    optional=True,
                    tooltip="How tokens are drawn, from LLM Sampling. Not wired: the model's own distribution.",
                ),
                io.Int.Input(
                    "max_tokens",
                    default=512,
                    min=0,
                    max=2**24,
                    tooltip="Most tokens of the answer; 0 is all that fits the model's context.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=MAX_SEED,
                    control_after_generate=True,
                    tooltip="The same seed and inputs give the same text. In a list, item i gets seed + i, or its own "
                    "seed if a list of seeds is wired.",
                ),
                advanced(
                    io.Int.Input(
                        "thinking_budget",
                        default=0,
                        min=0,
                        max=2**24,
                        tooltip="Most tokens of thinking: then the block is closed and the answer begins. "
                        "0 is no limit.",
                    )
                ),
                advanced(
                    io.Combo.Input(
                        "on_cut_thinking",
                        options=list(get_args(OnCutThinking)),
                        default="error",
                        tooltip="If max_tokens comes while the model still thinks: stop with an error, give an empty "
                        "text, or give the thinking as the text.",
                    )
                ),
            ],
            outputs=[
                io.String.Output(
                    "text", display_name="text", is_output_list=True, tooltip="The answer, without its thinking."
                ),
                io.String.Output(
                    "thinking_text",
                    display_name="thinking_text",
                    is_output_list=True,
                    tooltip="What the model thought, if it did.",
                ),
                io.String.Output(
                    "report",
                    display_name="report",
                    is_output_list=True,
                    tooltip="JSON: why it ended, tokens, latencies, engine, memory, warnings.",
                ),
            ],
        )

    @classmethod
    def execute(
        cls,
        llm: list[ModelSpec],
        prompt: list[Prompt | str],
        max_tokens: list[int],
        seed: list[int],
        thinking_budget: list[int],
        on_cut_thinking: list[OnCutThinking],
        sampling: list[Sampling] | None = None,
    ) -> io.NodeOutput:
        items = items_of(llm, prompt, seed, max_tokens, sampling or [Sampling()], thinking_budget, on_cut_thinking)
        with host.using(cls.hidden, llm), host.translated_errors():
            results = answer(items, host.live_text(cls.hidden, len(items)))
        texts = [result.text for result in results]
        host.keep_text(cls.hidden, texts)
        thinking = [result.thinking_text for result in results]
        reports = [json.dumps(result.report, ensure_ascii=False) for result in results]
        ui = {"text": texts, "thinking_text": thinking, "report": reports}
        return io.NodeOutput(texts, thinking, reports, ui=ui)
