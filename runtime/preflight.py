"""Refuse what cannot fit before anything is loaded, with the numbers and a way out."""

from __future__ import annotations

from .errors import OutOfMemory
from .request import ModelSpec
from .room import Room
from .telemetry import Bytes, format_bytes


def check_fits(spec: ModelSpec, needed: Bytes, room: Room) -> None:
    """Raise OutOfMemory if the model needs more than can be made free where it would run."""
    found = room.can_free(spec) if needed.device else None
    if found is None:
        return
    device, can_be_free = found
    if needed.device <= can_be_free:
        return
    parts = f"{format_bytes(needed.weights)} for its weights"
    if needed.kv_cache:
        parts += f" + {format_bytes(needed.kv_cache)} for its KV cache"
    if rest := needed.captured + needed.scratch:
        parts += f" + {format_bytes(rest)} of scratch"
    raise OutOfMemory(
        f"{spec.model} needs {parts}; {format_bytes(can_be_free)} can be made free on {device}. "
        "Choose 4-bit weights, a smaller context_len, another device, or a server."
    )
