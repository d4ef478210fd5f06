"""What a server is asked: the JSON body of one request, for each endpoint that it may go to.

Sampling is always explicit: a server's own defaults come from the model's files and would differ between engines.
"""

from __future__ import annotations

from typing import Any

from ...errors import TemplateFailed
from ...request import Message, Prompt, Sampling
from ...shell import for_shell
from ..base import Work

LLAMACPP_MAX_SEED = 2**32 - 2
"""The value above it means "random" to llama.cpp."""

MAX_SEED = 2**63
"""Servers keep seeds in 64 bits with a sign, and to vLLM -1 means "random"."""

CONTINUES_ANSWER = ("vllm", "llamacpp", "sglang")
"""Servers whose chat endpoint goes on with a begun answer."""


def completion_body(work: Work, model: str) -> dict[str, Any]:
    """For /v1/completions: the prompt as ids, so that no text in it can become a control token."""
    body = _openai_body(work, model)
    body["prompt"] = list(work.encoded.token_ids or ())
    return body


def chat_body(work: Work, model: str, kind: str) -> dict[str, Any]:
    """For /v1/chat/completions: the server builds the prompt from the messages."""
    body = _openai_body(work, model)
    prompt = work.encoded.prompt
    body["messages"] = [{"role": one.role, "content": one.text} for one in chat_messages(prompt)]
    if prompt.answer_prefix:
        body["messages"].append({"role": "assistant", "content": prompt.answer_prefix})
        if kind != "llamacpp":
            body |= {"add_generation_prompt": False, "continue_final_message": True}
    options = dict(prompt.template_options)
    if prompt.thinking != "auto":
        options["enable_thinking"] = prompt.thinking == "on"
    if options:
        body["chat_template_kwargs"] = options
    return body


def native_body(work: Work, context_len: int) -> dict[str, Any]:
    """For llama.cpp's own /completion, which takes ids and returns them; penalties look back over the whole context."""
    sampling = work.sampling
    return {
        "prompt": list(work.encoded.token_ids or ()),
        "n_predict": -1 if work.max_tokens is None else work.max_tokens,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "cache_prompt": True,
        "stop": list(work.stop_strings),
        "ignore_eos": work.encoded.is_endless,
        "seed": work.seed % LLAMACPP_MAX_SEED,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": context_len,
    }


def _openai_body(work: Work, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": work.seed % MAX_SEED,
        "return_token_ids": True,
        **_sampling(work.sampling),
    }
    if work.max_tokens is not None:
        body["max_tokens"] = work.max_tokens
    if work.stop_strings:
        body["stop"] = list(work.stop_strings)
    if work.encoded.is_endless:
        body["ignore_eos"] = True
    if work.encoded.stop:
        body["stop_token_ids"] = [entry.id for entry in work.encoded.stop]
    return body


def _sampling(sampling: Sampling) -> dict[str, float | int]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }


def chat_messages(prompt: Prompt) -> tuple[Message, ...]:
    """The messages as a chat endpoint gets them: a system message folded away if the prompt says so."""
    if not prompt.fold_system or prompt.messages[0].role != "system" or len(prompt.messages) < 2:
        return prompt.messages
    system, first, *rest = prompt.messages
    return (Message.of(first.role, f"{system.text}\n\n{first.text}"), *rest)


def check_chat(prompt: Prompt, kind: str) -> tuple[str, ...]:
    """What a chat endpoint cannot do for this prompt, as notes; raises TemplateFailed if that changes the answer."""
    remedy = (
        "Give the profile the folder of the served model's tokenizer: "
        f"{for_shell('python -m runtime profiles add NAME --url URL --tokenizer FOLDER')}"
    )
    if prompt.template is not None:
        raise TemplateFailed(
            f"This server builds the prompt itself, so the chosen chat template has no effect. {remedy}"
        )
    if prompt.answer_prefix and kind not in CONTINUES_ANSWER:
        raise TemplateFailed(f"This server cannot go on with a begun answer (answer_prefix). {remedy}")
    if prompt.drop_history:
        return (f"drop_history has no effect: only the server counts this prompt's tokens. {remedy}",)
    return ()
