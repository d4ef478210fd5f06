"""Node definitions that every supported ComfyUI understands."""

from __future__ import annotations

import dataclasses
from typing import Any

from comfy_api.latest import io

CATEGORY = "Resident LLM"

KNOWN = {field.name for field in dataclasses.fields(io.Schema)}


def schema(**fields: Any) -> io.Schema:
    """A schema of the fields that this ComfyUI knows: newer ones (`search_aliases`) are left out on an older host."""
    fields.setdefault("category", CATEGORY)
    return io.Schema(**{name: value for name, value in fields.items() if name in KNOWN})


def advanced(one: io.Input) -> io.Input:
    """The same input, folded away until it is wanted: by the page where it can, else by web/fold.mjs."""
    one.extra_dict = {**(one.extra_dict or {}), "advanced": True}
    return one
