"""Run one workflow in a real ComfyUI and print what it writes as it is written; or keep the server up.

python -m tools.run [PROMPT.json]    a prompt in API format; the first workflow by default
python -m tools.run --serve          only the server, until Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from tools.comfyui import BUILD, HOST, ROOT, ComfyUI
from tools.fault import Fault, told
from tools.model import make_model
from tools.prompt_run import Event, PromptRun, run_prompt

FIRST_WORKFLOW = ROOT / "tests" / "prompts" / "01-prompt-expansion.json"
USUAL_PORT = 8188


def read_prompt(path: Path) -> dict[str, Any]:
    """An API-format prompt from a file."""
    try:
        prompt = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Fault(f"There is no prompt to run at {path}: {error.strerror}.") from error
    except ValueError as error:
        raise Fault(f"{path} is not JSON: {error}.") from error
    if not (isinstance(prompt, dict) and prompt and all("class_type" in node for node in prompt.values())):
        raise Fault(f"{path} is not an API-format prompt. In ComfyUI, use Export (API) to make one.")
    return prompt


def has_gpu() -> bool:
    """Whether ComfyUI may run on a GPU here; a CPU build of torch is told by its version, without importing it."""
    if importlib.metadata.version("torch").endswith("+cpu"):
        return False
    import torch

    return bool(torch.cuda.is_available())


class Printer:
    """Prints a run while it happens: a status line per phase, then the text as it grows, each item's on a line."""

    def __init__(self) -> None:
        self._phase = ""
        self._printed: dict[tuple[object, ...], str] = {}
        self._writing: tuple[object, ...] | None = None

    def __call__(self, event: Event) -> None:
        if event.type != "resident.stream":
            return
        data = event.data
        is_new_phase, self._phase = data["phase"] != self._phase, data["phase"]
        self._write((data["node"], data["index"], data["channel"]), data["delta"], bool(data.get("is_snapshot")))
        if data["done"] or (is_new_phase and self._phase != "decode"):
            self.line(f"[{data['status']}]")

    def _write(self, item: tuple[object, ...], text: str, is_snapshot: bool) -> None:
        """Go on with an item's text; of a snapshot, which holds all of it, only what is not printed yet."""
        printed = self._printed.get(item, "")
        if is_snapshot:
            text = text.removeprefix(printed)
        if not text:
            return
        if self._writing not in (item, None):
            print()
        print(text, end="", flush=True)
        self._writing, self._printed[item] = item, printed + text

    def line(self, text: str) -> None:
        """A line of its own, after whatever stands in the current one."""
        print(text if self._writing is None else f"\n{text}", flush=True)
        self._writing = None


def outputs_of(run: PromptRun) -> str:
    """What the nodes gave the UI, one part per output; JSON in strings is laid out."""
    parts = []
    for node, output in run.outputs.items():
        for name, values in output.items():
            for value in values if isinstance(values, (list, tuple)) else [values]:
                parts.append(f"-- node {node}, {name}:\n{_laid_out(value)}")
    return "\n".join(parts)


def _laid_out(value: object) -> str:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            if isinstance(parsed := json.loads(value), (dict, list)):
                value = parsed
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def show(run: PromptRun) -> None:
    """Print the outputs of a run; raises Fault if it did not end well."""
    if run.status == "success":
        print(outputs_of(run))
        return
    error = run.error or {}
    if run.status == "rejected":
        raise Fault(f"ComfyUI refused the prompt: {json.dumps(error, ensure_ascii=False)}")
    if run.status == "error":
        raise Fault(f"Node {error['node_id']} ({error['node_type']}) failed: {error['exception_message'].strip()}")
    raise Fault(f"The prompt ended as {run.status or 'unknown'}.")


def port_for_people() -> int | None:
    """ComfyUI's usual port if it is free, else None for any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, USUAL_PORT))
        except OSError:
            return None
    return USUAL_PORT


def server(port: int | None = None) -> ComfyUI:
    """A server with this pack and the model, its files under .build/run."""
    return ComfyUI(BUILD / "run", models=[make_model()], port=port, is_on_cpu=not has_gpu())


def serve() -> int:
    """Keep a server up until it ends or is interrupted."""
    comfy = server(port_for_people())
    print("Starting ComfyUI", flush=True)
    with comfy:
        print(f"ComfyUI with Resident LLM: {comfy.url}\nLog: {comfy.log_path}\nCtrl-C stops it.", flush=True)
        assert comfy.process is not None
        return comfy.process.wait()


def run(path: Path) -> int:
    """Run one prompt and print it live."""
    prompt = read_prompt(path)
    comfy = server()
    print("Starting ComfyUI", flush=True)
    with comfy:
        print(f"ComfyUI answers at {comfy.url}; running {os.path.relpath(path)}", flush=True)
        printer = Printer()
        ended = run_prompt(comfy, prompt, on_event=printer)
        printer.line("")
        show(ended)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.run", description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", type=Path, default=FIRST_WORKFLOW)
    parser.add_argument("--serve", action="store_true", help="keep the server up and print its address")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is stopped then too
    return serve() if arguments.serve else run(arguments.prompt)


if __name__ == "__main__":
    sys.exit(told(main))
