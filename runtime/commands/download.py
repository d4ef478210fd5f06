"""Fetch a model from the hub into a folder of models; ctrl-C keeps what has come."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path

from ..errors import ModelNotFound
from ..models.download import download, is_there, recorded
from ..models.folders import model_folders
from ..telemetry import format_bytes

HELP = "Download a model from the hub, as safetensors or GGUF; run it again to go on where it stopped."

LINE_GAP_S = 10
"""Between two lines of progress where no terminal is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME on the hub, such as Qwen/Qwen3-4B-Instruct-2507")
    parser.add_argument("--revision", help="a branch, tag or commit; default: the newest, which is then recorded")
    parser.add_argument("--only", metavar="PATTERN", help="only weights whose file name fits, such as '*Q4_K_M*'")
    parser.add_argument("--into", metavar="FOLDER", help="default: the first of the model folders that doctor shows")


def run(args: argparse.Namespace) -> int:
    into = Path(args.into) if args.into else _first_folder()
    if is_there(args.repo, into, revision=args.revision, only=args.only):
        print(f"{args.repo} is there already.", file=sys.stderr)
    is_terminal, told_at, is_told = sys.stderr.isatty(), time.monotonic(), False
    with closing(download(args.repo, into, revision=args.revision, only=args.only)) as fetching:
        while True:
            try:
                progress = next(fetching)
            except StopIteration as end:
                folder: Path = end.value
                break
            if not progress.total:
                continue
            if not is_told:
                print(f"{args.repo}: {format_bytes(progress.total)} into {into}", file=sys.stderr)
                is_told = True
            line = f"{format_bytes(progress.done)} of {format_bytes(progress.total)}, {progress.what}"
            if is_terminal:
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            elif time.monotonic() - told_at > LINE_GAP_S:
                told_at = time.monotonic()
                print(line, file=sys.stderr, flush=True)
    if is_terminal and is_told:
        print(file=sys.stderr)
    print(f"revision {(recorded(folder) or {})['revision']}", file=sys.stderr)
    print(folder)
    return 0


def _first_folder() -> Path:
    """Where ComfyUI looks for language models, as far as a shell can know."""
    folders = model_folders()
    if not folders:
        raise ModelNotFound(
            "No folder for models is known here. Say --into FOLDER, or set COMFYUI_PATH to your ComfyUI folder."
        )
    return Path(folders[0].path)
