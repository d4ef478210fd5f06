"""A model's config in the form that ExLlamaV2 0.3.2 reads rightly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ModelUnsupported
from .info import ModelInfo

if TYPE_CHECKING:
    from .awq import Scheme

ARCHITECTURES = frozenset(
    f"{name}ForCausalLM"
    for name in (
        *("Cohere", "Cohere2", "Gemma", "Gemma2", "Glm4", "Granite", "Llama", "MiniCPM", "Mistral", "Mixtral"),
        *("Orion", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "Starcoder2", "Yi"),
    )
)
"""What 0.3.2 knows by name. It loads any other as Llama, with a printed warning."""

FUSED = frozenset({"Phi3ForCausalLM"})
"""These store q, k and v in one tensor, which the library can split in 16 bit only."""

ELSEWHERE = "Use the transformers engine, or a vLLM server."


def check_supported(config: Mapping[str, object]) -> str | None:
    """The quantisation method of a model that ExLlamaV2 can run; raises ModelUnsupported with what would run it."""
    return _quantisation(config, _architecture(config))


def why_unsupported(info: ModelInfo) -> str | None:
    """Why ExLlamaV2 cannot run this model, for the engine table; None where it can."""
    try:
        check_supported(info.config)
    except ModelUnsupported as error:
        return str(error)
    return None


def _architecture(config: Mapping[str, object]) -> str:
    named = config.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ModelUnsupported(
            f"ExLlamaV2 cannot run {', '.join(names) or 'a model without an architecture'}: it knows "
            f"{', '.join(sorted(name.removesuffix('ForCausalLM') for name in ARCHITECTURES))}. {ELSEWHERE}"
        )
    return names[0]


def _quantisation(config: Mapping[str, object], architecture: str) -> str | None:
    quant = config.get("quantization_config")
    if not isinstance(quant, Mapping):
        return None
    method, bits = str(quant.get("quant_method")), quant.get("bits")
    if method in ("awq", "compressed-tensors") and architecture in FUSED:
        raise ModelUnsupported(f"{architecture} has fused projections, which cannot be repacked. {ELSEWHERE}")
    if method == "gptq" and bits != 4:
        raise ModelUnsupported(f"This GPTQ model has {bits} bits; ExLlamaV2 runs 4. {ELSEWHERE}")
    if method == "gptq" and quant.get("checkpoint_format") == "gptq_v2":
        raise ModelUnsupported(
            "This GPTQ model has the gptq_v2 format, whose zero points of 0 ExLlamaV2 spoils for their neighbours. "
            + ELSEWHERE
        )
    if method not in ("awq", "compressed-tensors", "gptq", "exl2"):
        raise ModelUnsupported(f"ExLlamaV2 cannot read {method} weights: it reads 16 bit, GPTQ, EXL2, AWQ. {ELSEWHERE}")
    return method


def flat_rope(config: Mapping[str, object]) -> dict[str, object]:
    """A copy of a config with `rope_theta` and `rope_scaling` at top level, as before transformers 5.

    Newer configs keep both in `rope_parameters`; readers that look only at `rope_theta` then fall back to 10000
    without a word. Raises ModelUnsupported where no base is given at all.
    """
    flat = dict(config)
    nested = flat.get("rope_parameters")
    if isinstance(nested, Mapping):
        flat.setdefault("rope_theta", nested.get("rope_theta"))
        scaling = {key: value for key, value in nested.items() if key != "rope_theta"}
        if scaling.get("rope_type", "default") != "default" and not flat.get("rope_scaling"):
            flat["rope_scaling"] = scaling
    scaling_now = flat.get("rope_scaling")
    if isinstance(scaling_now, Mapping):
        kind = scaling_now.get("rope_type") or scaling_now.get("type")
        rest = {key: value for key, value in scaling_now.items() if key not in ("type", "rope_type")}
        flat["rope_scaling"] = {**rest, "rope_type": kind} if kind != "default" or rest else None
    if not isinstance(flat.get("rope_theta"), (int, float)):
        raise ModelUnsupported(
            "The config names no rotary base (rope_theta), and guessing one would give wrong text. "
            "Add rope_theta to config.json, as the model's authors give it."
        )
    return flat


def exllamav2_config(config: dict[str, object], scheme: Scheme) -> dict[str, object]:
    """The config that ExLlamaV2 0.3.2 reads rightly: GPTQ without activation order, rotary settings at top level.

    `checkpoint_format` is left out on purpose: its "gptq_v2" makes the library subtract across nibbles.
    """
    quantization: dict[str, object] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": scheme.group or -1,
        "desc_act": False,
        "sym": scheme.is_symmetric,
    }
    return {**flat_rope(config), "quantization_config": quantization}
