"""A real ComfyUI for tests: the process of tools/comfyui.py, with prompts to run on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools import comfyui
from tools.prompt_run import Event, EventSocket, PromptRun, run_prompt

__all__ = ["ComfyUI", "Event", "EventSocket", "PromptRun"]


class ComfyUI(comfyui.ComfyUI):
    """`with ComfyUI(base, models=[...]) as comfy: run = comfy.run_prompt(prompt)`; see tools/comfyui.py."""

    def run_prompt(self, prompt: Mapping[str, Any], **options: Any) -> PromptRun:
        """Queue an API-format prompt and follow it to its end; the options are those of tools.prompt_run."""
        return run_prompt(self, prompt, **options)

    def use_settings(self, settings: Mapping[str, object]) -> None:
        """Change front-end settings; the next page that opens sees them."""
        self.post("/settings", dict(settings))

    def interrupt(self) -> None:
        self.post("/interrupt")

    def free(self) -> None:
        """Ask for all models to be unloaded, as the Manager's button does; the server acts when it is idle."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def __enter__(self) -> ComfyUI:
        self.start()
        return self
