"""Print or run the vLLM command that serves a model on this machine; vLLM lives in an environment of its own."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .. import serving
from ..machine import TORCH_PROBE, probe
from ..models.info import read_model
from ..serving import Card, ManagedServer, Wish

HELP = "Print, or with --run start, the vLLM command that serves a model on this machine."

PYTHON_VARIABLE = "RESIDENT_LLM_VLLM_PYTHON"
DIST_PROBE = """
import json
from importlib import metadata
try:
    print(json.dumps({"has_command": bool(metadata.version("vllm"))}))
except metadata.PackageNotFoundError:
    print(json.dumps({"has_command": False}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder")
    parser.add_argument("--run", action="store_true", help="start it, and stop it when this command ends")
    parser.add_argument(
        "--python", help=f"the Python of vLLM's environment; default: ${PYTHON_VARIABLE}, then vllm's own"
    )
    parser.add_argument("--name", help="the name it is served by; default: the folder's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="cards that share each layer")
    parser.add_argument(
        "--pipeline-parallel", type=int, default=1, metavar="N", help="groups of layers, on hosts apart"
    )
    parser.add_argument("--gpu-fraction", type=float, default=0.9, metavar="F", help="part of each card to take")
    parser.add_argument("--context-len", type=int, help="default: the model's, or what fits")
    parser.add_argument("--kv-cache", default="auto", help="auto or fp8")
    parser.add_argument("--flags", default="", metavar="TEXT", help="further flags for vLLM, in one string")


def run(args: argparse.Namespace) -> int:
    extra = tuple(shlex.split(args.flags))
    serving.check_flags(extra)
    info = read_model(args.model)
    python = args.python or os.environ.get(PYTHON_VARIABLE)
    wish = Wish(
        served_name=args.name or Path(args.model).resolve().name,
        host=args.host,
        port=args.port,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        gpu_fraction=args.gpu_fraction,
        context_len=args.context_len,
        kv_cache=args.kv_cache,
        extra=extra,
    )
    made = serving.plan(info, wish, _cards(python or sys.executable), _launcher(python))
    for note in made.notes:
        print(note, file=sys.stderr)
    print(made, flush=True)
    return _run(made, f"http://{args.host}:{args.port}") if args.run else 0


def _launcher(python: str | None) -> Sequence[str]:
    """How that environment starts vLLM: by its command, which some builds of another name lack, or by its module."""
    if python is None:
        return (shutil.which("vllm") or "vllm", "serve")
    facts = probe(DIST_PROBE, python=python).facts or {}
    if facts.get("has_command", True):
        return (str(Path(python).parent / "vllm"), "serve")
    return (python, "-m", "vllm.entrypoints.openai.api_server")


def _cards(python: str) -> list[Card]:
    """The GPUs as torch of that environment sees them; none on a machine without."""
    facts = probe(TORCH_PROBE, python=python).facts or {}
    devices = facts.get("devices")
    found = devices if isinstance(devices, list) else []
    return [Card(name=device["name"], total_bytes=device["total_bytes"]) for device in found]


def _run(made: serving.Plan, url: str) -> int:
    server = ManagedServer(made, url)

    def end(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    try:
        server.wait_until_ready(lambda waited_s: None)
        print(f"Ready at {url}. In ComfyUI choose it in Connect LLM Server.", flush=True)
        return server.wait()
    finally:
        server.close()
