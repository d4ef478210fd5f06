"""The extension that ComfyUI loads, and the list of its nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import host, routes
from .benchmark import Benchmark
from .download import Download
from .generate import Generate
from .load import LoadLLM
from .load_exllamav2 import LoadExLlamaV2
from .memory import Free
from .monitor import Monitor
from .prompt import LLMPrompt
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
    Free,
    Monitor,
    Benchmark,
)


class Extension(ComfyExtension):
    """What ComfyUI asks for the nodes; hosts differ in which of the two methods they call first."""

    async def on_load(self) -> None:
        host.register_folders()
        routes.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        host.register_folders()
        routes.register()
        return list(NODES)
