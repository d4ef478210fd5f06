"""A ComfyUI node for `tools.bench` alone: the plainest decode loop that transformers allows, inside the server."""

from __future__ import annotations

import functools
import json
import time
from typing import Any


@functools.cache
def loaded(model_path: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device)
    return model, PreTrainedTokenizerFast.from_pretrained(model_path)


def decode_rate(model_path: str, device: str, messages: list[dict[str, str]], num_tokens: int) -> float:
    """Greedy decode tok/s after the first token, by a clock around the loop."""
    import torch

    model, tokenizer = loaded(model_path, device)
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model(encoded["input_ids"].to(device), use_cache=True)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        token.item()
        began_at = time.perf_counter()
        for _ in range(num_tokens - 1):
            output = model(token, cache=output.cache, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            token.item()
        return (num_tokens - 1) / (time.perf_counter() - began_at)


class BenchBareLoop:
    """Outputs tok/s under `rate`; another `run` makes it run again."""

    RETURN_TYPES = ()
    FUNCTION = "measure"
    CATEGORY = "bench"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        texts = {name: ("STRING", {}) for name in ("model_path", "device", "messages")}
        numbers = {name: ("INT", {"min": 0, "max": 2**31}) for name in ("num_tokens", "run")}
        return {"required": {**texts, **numbers}}

    def measure(self, model_path: str, device: str, messages: str, num_tokens: int, run: int) -> dict[str, Any]:
        return {"ui": {"rate": [decode_rate(model_path, device, json.loads(messages), num_tokens)]}}


NODE_CLASS_MAPPINGS = {"BenchBareLoop": BenchBareLoop}
