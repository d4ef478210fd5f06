"""Download LLM: fetch a model of the user's own list. A workflow from a stranger can name no other."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..runtime import ModelSpec
from ..runtime.errors import ModelNotFound, ResidentError
from ..runtime.models.hub import check_name
from ..runtime.shell import for_shell
from ..runtime.telemetry import format_bytes
from . import host, models
from .schema import advanced, schema
from .types import LLM

LIST_FILE = "allowed_downloads.txt"
NONE_ALLOWED = "(your list is empty)"


def list_path() -> Path:
    """The user's list: OWNER/NAME on each line, # begins a remark."""
    return Path(host.system_user_folder()) / LIST_FILE


def allowed() -> list[str]:
    """The repositories that may be downloaded from a graph."""
    try:
        text = list_path().read_text(encoding="utf-8")
    except OSError:
        return []
    return [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]


def require_allowed(repo: str) -> None:
    """Raise ModelNotFound, with the command and the list's place, unless the user has put the repository there."""
    if repo in allowed():
        return
    if repo == NONE_ALLOWED:
        named, said = "OWNER/NAME", "Your list of downloads is empty."
    else:
        check_name(repo)  # a workflow from a stranger must not put anything else into a line for the shell
        named, said = repo, f"{repo} is not on your list of downloads."
    raise ModelNotFound(
        f"{said} Add the line {named} to {list_path()} and run again, or fetch it in a shell with: "
        f"{for_shell('python -m runtime download', named)}"
    )


class Download(io.ComfyNode):
    """Fetch a model and hand it on, as its name and as a ModelSpec."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        repos = allowed() or [NONE_ALLOWED]
        return schema(
            node_id="ResidentDownload",
            display_name="Download LLM",
            description="Fetch a language model into the LLM folder, when the node is run and only if it is on your "
            "own list. One that is there already is not asked for again.",
            search_aliases=["hugging face", "hub", "get model"],
            is_output_node=True,
            hidden=list(host.HIDDEN),
            inputs=[
                io.Combo.Input(
                    "repo",
                    options=repos,
                    tooltip="A repository of your list, user/__resident_llm/allowed_downloads.txt: OWNER/NAME, one a "
                    "line.",
                ),
                io.String.Input(
                    "revision",
                    default="",
                    tooltip="A branch, tag or commit. Empty: the newest, whose commit is then recorded beside the "
                    "model.",
                ),
                advanced(
                    io.String.Input(
                        "only",
                        default="",
                        tooltip="Only weights whose file name fits this pattern, such as *Q4_K_M*: for repositories "
                        "with several GGUF files.",
                    )
                ),
            ],
            outputs=[
                LLM.Output("llm", display_name="llm", tooltip="The model, for Generate Text, with default settings."),
                io.String.Output("model", display_name="model", tooltip="Its name in the menu of Load LLM."),
            ],
        )

    @classmethod
    def validate_inputs(cls, repo: str | None = None) -> bool | str:
        """The list may have changed since the page was loaded; a wired name arrives as None."""
        if repo is None:
            return True
        try:
            require_allowed(repo)
        except ModelNotFound as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, repo: str | None = None, **_: Any) -> str:
        """A folder that was changed or taken away is looked at again."""
        host.begin_prompt()
        folder = Path(host.llm_folders()[0]) / (repo or "").rpartition("/")[2]
        return models.revision(str(folder)) if repo and folder.is_dir() else ""

    @classmethod
    def execute(cls, repo: str, revision: str = "", only: str = "") -> io.NodeOutput:
        require_allowed(repo)
        from ..runtime.models.download import download  # brings an HTTP client, which only this run needs

        root = host.llm_folders()[0]
        fetching = download(repo, Path(root), revision=revision.strip() or None, only=only.strip() or None)
        bar, folder, num_bytes = None, None, 0
        with contextlib.closing(fetching):
            while folder is None:
                try:
                    progress = next(fetching)
                except StopIteration as end:
                    folder = end.value
                    continue
                host.check_interrupt()
                num_bytes = progress.total
                if progress.total:
                    bar = bar or host.progress_bar(cls.hidden, progress.total)
                    bar.update_absolute(progress.done, progress.total)
        name, path = found_in(root, folder)
        said = f"{name}: {format_bytes(num_bytes)} fetched" if num_bytes else f"{name}: there already"
        spec = ModelSpec(model=path, revision=models.revision(path), device=host.settle_device("auto"))
        return io.NodeOutput(spec, name, ui={"text": [said]})


def found_in(root: str, folder: Path) -> tuple[str, str]:
    """(name in the menu, path) of the model in a downloaded folder: the folder itself, or the GGUF file in it."""
    below = models.scan([root]).models
    for name, path in below.items():
        if Path(path) == folder or folder in Path(path).parents:
            return name, os.path.realpath(path)
    raise ResidentError(f"{folder} holds no model that can be loaded. Delete the folder and download it again.")
