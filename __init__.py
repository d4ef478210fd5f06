"""Resident LLM for ComfyUI: what ComfyUI imports. Nothing heavy happens here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import Extension

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Extension:
    """What ComfyUI calls to get the nodes."""
    from .nodes import Extension

    return Extension()
