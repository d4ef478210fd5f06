"""Which engine fits a model's format best."""

from __future__ import annotations

from .info import ModelInfo, read_model

SERVER = ("http://", "https://")

BY_QUANT = {
    "exl2": ("exllamav2",),
    "exl3": ("exllamav3",),
    "gptq": ("exllamav2", "transformers"),
    "awq": ("transformers",),
}
"""Engines by a folder's quantisation, best first; whatever is not listed goes to transformers."""


def preferred_engines(model: str) -> tuple[str, ...]:
    """Names of the engine table for "auto", best first; raises what `read_model` raises."""
    if model.startswith(SERVER):
        return ("openai",)
    return engines_for(read_model(model))


def engines_for(info: ModelInfo) -> tuple[str, ...]:
    """The same for a model that was read; whether an engine is installed is not asked here."""
    if info.format == "gguf":
        return ("llamacpp", "transformers")
    return BY_QUANT.get(info.quant_method or "", ("transformers",))
