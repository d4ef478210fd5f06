"""Say what this machine can run and why the rest cannot; or answer what well-known write-ups claim."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .. import claims, machine
from ..errors import ResidentError
from ..models.suggestions import advice
from ..shell import for_shell
from ..telemetry import format_bytes

HELP = "Show what this machine can run, and why the rest cannot."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one object instead of lines")
    parser.add_argument(
        "--claims",
        nargs="?",
        const="",
        metavar="ID or words",
        help="what well-known write-ups claim, what is true, and what this pack does: all, one id, or a search",
    )


def run(args: argparse.Namespace) -> int:
    if args.claims is not None:
        return _claims(args.claims, as_json=args.json)
    facts = machine.look()
    print(json.dumps(facts) if args.json else "\n".join(_lines(facts)))
    return 0


def _claims(words: str, *, as_json: bool) -> int:
    found = claims.find(words)
    if not found:
        raise ResidentError(f"No claim matches {words!r}. Leave the words out to see all, or try one word.")
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return 0
    for one in found:
        print(f"{one.id}  {claims.VERDICTS[one.verdict]}: {one.claim}\n    {one.truth}\n    Here: {one.ours}\n")
    return 0


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for a reader."""
    for name, text in _facts(facts):
        yield f"{name:13} {text}"
    for title, rows in (
        ("devices", _devices(facts["devices"])),
        ("engines", _engines(facts["engines"])),
        ("patches", (f"{one['id']}: {one['status']}, {one['why']}" for one in facts["patches"])),
        ("model folders", _folders(facts["model_folders"], facts["devices"])),
    ):
        yield from ("", title, *(f"  {row}" for row in rows))


def _facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    pack, system, torch = facts["pack"], facts["system"], facts["torch"]
    driver, nvcc, flash = facts["driver"], facts["nvcc"], facts["flash_attn"]
    yield "resident-llm", f"{pack['version']} in {pack['path']}"
    for copy in pack["other_copies"]:
        yield "", f"A second copy is in {copy}: remove one of them."
    yield "python", f"{facts['python']['version']} ({facts['python']['executable']})"
    memory = f", {format_bytes(system['memory_bytes'])} memory" if system["memory_bytes"] else ""
    yield "system", system["name"] + memory
    if system["is_wsl"]:
        yield "", "WSL: CUDA comes from the Windows driver; install no Linux driver inside."
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "a CPU build"
    yield "torch", f"cannot run: {torch['fault']}" if torch["fault"] else f"{torch['version']}, {built}"
    served = f"{driver['version']}, serves CUDA up to {driver['max_cuda']}"
    yield "driver", f"none found: {driver['fault']}" if driver["fault"] else served
    at = f"{nvcc['version']} at {nvcc['path']}" if nvcc["path"] else ""
    yield "nvcc", ". ".join(part for part in (at, nvcc["fault"]) if part)
    works = f"{flash['version']} works, largest error {flash['max_error']:.1e}" if flash["works"] else ""
    yield "flash-attn", works or f"cannot be used: {flash['fault']}; {flash['remedy']}"
    yield "packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items()) or "none"


def _devices(devices: list[dict[str, Any]]) -> Iterator[str]:
    for one in devices:
        if "num_cores" in one:
            yield f"{one['device']:7} {one['name']}, {one['num_cores']} cores"
            continue
        free, total = format_bytes(one["free_bytes"]), format_bytes(one["total_bytes"])
        yield f"{one['device']:7} {one['name']}, capability {one['capability']}, {free} of {total} free"
        if one["fault"]:
            yield f"{'':7} {one['fault']}"


def _engines(engines: list[dict[str, Any]]) -> Iterator[str]:
    for one in engines:
        reason = one["why_unavailable"]
        remedy = f". Try: {for_shell(one['install'])}" if one["install"] and "doctor" not in one["install"] else ""
        yield f"{one['name']:13} " + (f"cannot run: {reason}{remedy}" if reason else "can run")


def _folders(folders: list[dict[str, Any]], devices: list[dict[str, Any]]) -> Iterator[str]:
    for one in folders:
        names = ", ".join(one["models"]) or "no models"
        yield f"{one['path']}: {names if one['exists'] else 'does not exist'}"
    if not folders:
        yield "none known: set COMFYUI_PATH to your ComfyUI folder, or RESIDENT_MODELS to a folder of models"
    if not any(one["models"] for one in folders):
        yield advice(max((one["total_bytes"] for one in devices if "total_bytes" in one), default=None))
