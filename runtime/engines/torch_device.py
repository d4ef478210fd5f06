"""Where a torch model runs and in which type."""

from __future__ import annotations

import torch

from ..errors import EngineUnavailable, ModelUnsupported

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LONG_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def pick_device(name: str) -> torch.device:
    """ "auto" is the first GPU if there is one, else the CPU; raises EngineUnavailable for one that is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise EngineUnavailable("There is no device mps on this machine. Choose auto or cpu.")
        return device
    kind = getattr(torch, device.type)
    count = kind.device_count() if kind.is_available() else 0
    if (device.index or 0) >= count:
        raise EngineUnavailable(
            f"There is no device {name}: this machine shows {count} {device.type.upper()} devices. Choose auto or cpu."
        )
    return torch.device(device.type, kind.current_device() if device.index is None else device.index)


def has_bf16(device: torch.device) -> bool:
    """Whether the card computes bf16 itself, and does not emulate it."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8 or torch.version.hip is not None


def pick_dtype(name: str, stored: str, device: torch.device) -> tuple[torch.dtype, str | None]:
    """(type, warning). "auto" is fp32 on a CPU; on a GPU fp16 for a model stored so, else bf16 if the card has it."""
    name = LONG_NAMES.get(name, name)
    if name != "auto":
        if name not in DTYPES:
            raise ModelUnsupported(f"dtype is {name!r}; it is one of auto, {', '.join(DTYPES)}.")
        return DTYPES[name], None
    if device.type == "cpu":
        return torch.float32, None
    if LONG_NAMES.get(stored) == "fp16":
        return torch.float16, None
    if has_bf16(device):
        return torch.bfloat16, None
    return torch.float16, f"{device} has no bf16: the model runs in fp16, where some models overflow."


def name_of(dtype: torch.dtype) -> str:
    """The short name of a type, as the loader's menu spells it."""
    return next((name for name, one in DTYPES.items() if one == dtype), str(dtype).removeprefix("torch."))
