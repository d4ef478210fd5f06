"""Resident LLM's runtime: a library without ComfyUI, light to import. These are its public names."""

from .collect import Collector, Result, collect, results_of
from .errors import ResidentError
from .request import GREEDY, Message, ModelSpec, Prompt, Request, Sampling
from .room import Room
from .runtime import Runtime, get
from .slot import Resident

__all__ = [
    "GREEDY",
    "Collector",
    "Message",
    "ModelSpec",
    "Prompt",
    "Request",
    "Resident",
    "ResidentError",
    "Result",
    "Room",
    "Runtime",
    "Sampling",
    "collect",
    "get",
    "results_of",
]
