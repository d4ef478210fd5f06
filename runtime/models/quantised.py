"""4-bit folders outside ExLlamaV2: which package transformers needs for them, and what else would run them."""

from __future__ import annotations

import importlib.util

from .info import ModelInfo

PACKAGES = {
    "awq": ("gptqmodel", "gptqmodel"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
}
"""quant_method -> (module, package) that transformers reads it with."""

ONLY_EXLLAMAV2 = frozenset({"exl2"})
"""What transformers has no reader for at all."""

ELSEWHERE = {
    "awq": "load it with ExLlamaV2, which repacks it once",
    "gptq": "load it with ExLlamaV2",
    "compressed-tensors": "load it with ExLlamaV2, which repacks 4-bit ones",
}


def why_not_in_transformers(info: ModelInfo) -> str | None:
    """Why transformers cannot load this quantised model here, with the three ways; None where nothing is missing."""
    if info.quant_method in ONLY_EXLLAMAV2:
        return f"{info.quant_method} weights are ExLlamaV2's own: load them with that engine"
    if info.quant_method not in PACKAGES:
        return None
    module, package = PACKAGES[info.quant_method]
    if importlib.util.find_spec(module) is not None:
        return None
    return (
        f"{info.quant_method} weights need the package {package}, which is not installed. Install it, "
        f"{other_ways(info)}"
    )


def other_ways(info: ModelInfo) -> str:
    """What runs such a model without transformers."""
    elsewhere = ELSEWHERE.get(str(info.quant_method), "get the model in 16 bit")
    return f"{elsewhere}, or serve it with vLLM and connect to that server"
