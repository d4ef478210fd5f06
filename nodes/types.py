"""Socket types. Each carries a frozen value: a ModelSpec, a Prompt, a Sampling. A report is a STRING of JSON."""

from __future__ import annotations

from comfy_api.latest import io

LLM = io.Custom("RESIDENT_LLM")
PROMPT = io.Custom("RESIDENT_PROMPT")
SAMPLING = io.Custom("RESIDENT_SAMPLING")
