"""The extension that ComfyUI loads, and the list of its nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import host, routes
from .benchmark import Benchmark
from .download import Download
from .generate import Generate
from .lines import Lines
from .load import LoadLLM
from .load_exllamav2 import LoadExLlamaV2
from .memory import Free
from .monitor import Monitor
from .prompt import LLMPrompt
from .review import Review
from .sampling import LLMSampling
from .server import ConnectServer

NODES: tuple[type[io.ComfyNode], ...] = (
    LoadLLM,
    LoadExLlamaV2,
    ConnectServer,
    Download,
    LLMPrompt,
    LLMSampling,
    Generate,
    Lines,
    Review,
    Free,
    Monitor,
    Benchmark,
)


class Extension(ComfyExtension):
    """What ComfyUI asks for the nodes; hosts differ in which of the two methods they call first."""

    async def on_load(self) -> None:
        _enter_host()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        _enter_host()
        return list(NODES)


def _enter_host() -> None:
    """Tell ComfyUI what we have beside nodes; doing it again changes nothing."""
    host.register_folders()
    host.carry_texts("ResidentGenerate")
    routes.register()
