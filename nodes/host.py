"""The one file that knows ComfyUI's internals: interrupt, progress, events to the browser, model folders, errors."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import comfy.model_management
import comfy.utils
import folder_paths
from comfy.comfy_types import IO
from comfy_api.latest import io
from server import PromptServer

from ..runtime import ModelSpec, Runtime, get, profiles
from ..runtime.errors import OutOfMemory
from ..runtime.events import Event
from ..runtime.monitor import Monitor
from . import residency, travel
from .last_use import LastUse
from .live import Live, Message

HIDDEN = [io.Hidden.unique_id, io.Hidden.dynprompt, io.Hidden.prompt]
"""What a node must ask for so that its live text finds its way, and its model leaves after its last use."""

ANY_TYPE: str = IO.ANY
"""The socket type that passes every link, in and out, on old hosts too."""

STREAM_EVENT = "resident.stream"
NOTICE_EVENT = "resident.notice"
BAR_GAP_S = 0.5

Answer = TypeVar("Answer")


def runtime() -> Runtime:
    """The process's runtime, under ComfyUI's memory ledger."""
    return residency.enter(get(), _notify)


def _notify(kind: str, values: dict[str, str]) -> None:
    """Tell the browser that owns the running prompt, and no other."""
    server = PromptServer.instance
    if server.client_id is not None:
        text = residency.NOTICES[kind].format(**values)
        server.send_sync(NOTICE_EVENT, {"kind": kind, "values": values, "text": text}, server.client_id)


_last_use = LastUse(lambda spec: runtime().evict(spec))


_monitor: Monitor | None = None


def monitor() -> Monitor:
    """The process's monitor, made on first use."""
    global _monitor
    if _monitor is None:
        _monitor = Monitor(runtime(), list_devices=_shown_devices, is_kept=_last_use.is_kept)
    return _monitor


def keep(spec: ModelSpec, is_kept: bool) -> None:
    """Have a model that is to leave after its run stay, or leave again."""
    _last_use.keep(spec, is_kept)


def _shown_devices() -> list[str]:
    return [name for name in devices()[1:] if name != "cpu"] or ["cpu"]


def add_route(method: str, path: str, handler: Callable[[Any], Awaitable[Any]]) -> None:
    """Serve a path on ComfyUI's server; one that is served already stays. ComfyUI adds its twin below /api."""
    routes = PromptServer.instance.routes
    if not any((one.method, one.path) == (method, path) for one in routes if hasattr(one, "path")):
        routes.route(method, path)(handler)


def prompt_id() -> str:
    """The prompt that is being run."""
    return str(PromptServer.instance.last_prompt_id)


def begin_prompt() -> None:
    """A node that is asked at the start of each prompt says so; models that were to leave by now leave."""
    _last_use.begin(prompt_id())


@contextlib.contextmanager
def using(hidden: Any, specs: Iterable[ModelSpec]) -> Iterator[None]:
    """A block that generates; after it, or after the prompt's last one of a model, `when_idle` is done."""
    try:
        yield
    finally:
        _last_use.used(prompt_id(), hidden.prompt, hidden.unique_id, map(runtime().settled, specs))


_answers = travel.Answers()


def keep_text(hidden: Any, texts: Sequence[str]) -> None:
    """Write a node's answers into the workflow that images of this prompt will carry."""
    node = hidden.unique_id
    if hidden.dynprompt is not None:
        node = hidden.dynprompt.get_display_node_id(node)
    _answers.keep(hidden.prompt or {}, node, texts)
    travel.write(_workflow(hidden.extra_pnginfo), node, texts)


def carry_texts(class_type: str) -> None:
    """From now on queued workflows carry the known answers of the nodes of this class that will not run again."""
    server = PromptServer.instance
    if _carried or not hasattr(server, "add_on_prompt_handler"):
        return
    _carried.append(class_type)

    def fill(queued: dict[str, Any]) -> dict[str, Any]:
        extra = queued.get("extra_data")
        pnginfo = extra.get("extra_pnginfo") if isinstance(extra, dict) else None
        _answers.fill(queued.get("prompt"), _workflow(pnginfo), class_type)
        return queued

    server.add_on_prompt_handler(fill)


_carried: list[str] = []


def register_folders() -> None:
    """Make `models/LLM` one of ComfyUI's model folders, beside those that other packs or the user registered."""
    default = os.path.join(folder_paths.models_dir, "LLM")
    folder_paths.add_model_folder_path("LLM", default)
    with contextlib.suppress(OSError):  # a read-only installation has its models elsewhere
        os.makedirs(default, exist_ok=True)
    profiles.use(Path(system_user_folder()) / profiles.FILE_NAME)


def system_user_folder() -> str:
    """Our folder for settings that no route of ComfyUI serves; older ones have the folder without a name for it."""
    find = getattr(folder_paths, "get_system_user_directory", None)
    if find is not None:
        return str(find("resident_llm"))
    return os.path.join(folder_paths.get_user_directory(), "__resident_llm")


def llm_folders() -> list[str]:
    """Every folder that may hold language models, ComfyUI's own first; both spellings of its key are in use."""
    known = folder_paths.folder_names_and_paths
    folders = [folder for key in ("LLM", "llm") if key in known for folder in known[key][0]]
    if os.path.isdir(lower := os.path.join(folder_paths.models_dir, "llm")):
        folders.append(lower)
    first = {os.path.realpath(folder): folder for folder in reversed(folders)}
    return [folder for folder in dict.fromkeys(folders) if first[os.path.realpath(folder)] == folder]


def user_folders(kind: str) -> list[str]:
    """Where the user's own files of a kind lie ("presets", "templates"): a folder that no HTTP route serves."""
    return [os.path.join(system_user_folder(), kind)]


def devices() -> list[str]:
    """The devices a model can be put on. Asks torch only if ComfyUI has loaded it."""
    torch = sys.modules.get("torch")
    if torch is None or comfy.model_management.cpu_mode():
        return ["auto", "cpu"]
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    xpu = [f"xpu:{index}" for index in range(torch.xpu.device_count())] if hasattr(torch, "xpu") else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["auto", "cpu", *cuda, *xpu, *mps]


def card_bytes() -> int | None:
    """All memory of ComfyUI's own device; None where it is the CPU, or where ComfyUI does not know."""
    if comfy.model_management.cpu_mode():
        return None
    with contextlib.suppress(Exception):  # advice about models must not fail over it
        return int(comfy.model_management.get_total_memory(comfy.model_management.get_torch_device()))
    return None


def settle_device(name: str) -> str:
    """ "auto" is ComfyUI's own device: with --cpu that is the CPU, even where there is a GPU."""
    return "cpu" if name == "auto" and comfy.model_management.cpu_mode() else name


def watch(events: Generator[Event, None, Answer], live: Live) -> Generator[Event, None, Answer]:
    """The same events; an interrupt is raised between two of them, and the stream is closed whatever happens."""
    with contextlib.closing(events):
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                answer: Answer = end.value
                return answer
            comfy.model_management.throw_exception_if_processing_interrupted()
            live.take(event)
            yield event


def check_interrupt() -> None:
    """Raise ComfyUI's exception if the user pressed stop."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def progress_bar(hidden: Any, total: int) -> Any:
    """The node's own bar; `update_absolute(done, total)` moves it."""
    return comfy.utils.ProgressBar(total, node_id=hidden.unique_id)


def output_folder() -> str:
    """Where ComfyUI lets nodes write."""
    return str(folder_paths.get_output_directory())


def image_of(picture: Any) -> Any:
    """A Pillow RGB picture as ComfyUI's IMAGE: float32 [1, height, width, 3], 0 to 1."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255)[None]


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Give an OutOfMemory that began in torch back as torch's own, with our sentence, so that ComfyUI frees memory."""
    try:
        yield
    except OutOfMemory as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, comfy.model_management.OOM_EXCEPTION) and not isinstance(cause, OutOfMemory):
                raise comfy.model_management.OOM_EXCEPTION(str(error)) from error
            cause = cause.__cause__
        raise


def live_text(hidden: Any, num_items: int) -> Live:
    """Where a node's live text goes: to the browser that owns the run; nowhere if there is none."""
    client = PromptServer.instance.client_id
    if client is None:
        return Live(num_items=num_items)
    return Live(_Browser(client, hidden).send, num_items=num_items)


def _workflow(extra_pnginfo: Any) -> Any:
    """The workflow that the page had open; None for a client that sends none."""
    return extra_pnginfo.get("workflow") if isinstance(extra_pnginfo, dict) else None


def _workflow_id(extra_pnginfo: Any) -> Any:
    """The id of that workflow; None for a client that sends none, or something else."""
    workflow = _workflow(extra_pnginfo)
    return workflow.get("id") if isinstance(workflow, dict) else None


class _Browser:
    """Sends messages of one node to the client that queued the prompt."""

    def __init__(self, client: str, hidden: Any) -> None:
        self._server = PromptServer.instance
        self._client = client
        self._socket = self._server.sockets.get(client)
        self._prompt_id = self._server.last_prompt_id
        self._node = hidden.unique_id
        if hidden.dynprompt is not None:
            self._node = hidden.dynprompt.get_display_node_id(hidden.unique_id)
        self._workflow = _workflow_id(hidden.extra_pnginfo)
        self._bar = comfy.utils.ProgressBar(1, node_id=hidden.unique_id)
        self._bar_at = float("-inf")

    def send(self, message: Message, live: Live) -> None:
        """One message of live text, and now and then a step of the progress bar.

        ComfyUI's own progress text is left alone: its page keeps that in the saved workflow.
        """
        socket = self._server.sockets.get(self._client)
        messages = [message]
        if socket is not self._socket:  # the page was loaded anew: it has lost what was sent before
            self._socket = socket
            messages = live.snapshots()
        for one in messages:
            data = {"prompt_id": self._prompt_id, "node": self._node, "workflow": self._workflow, **one}
            self._server.send_sync(STREAM_EVENT, data, self._client)
        now = time.monotonic()
        if live.progress is not None and now - self._bar_at >= BAR_GAP_S:
            self._bar_at = now
            self._bar.update_absolute(*live.progress)
