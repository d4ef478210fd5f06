"""A model's config in the form that ExLlamaV2 0.3.2 reads rightly."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ModelUnsupported
from .awq import Scheme


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
