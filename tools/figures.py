"""Measured figures for README, from the results that a GPU run left under bench/results; nothing is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"

Rows = list[tuple[str, str]]


def _read(name: str) -> Any:
    file = RESULTS / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"


def residency() -> tuple[str, Rows] | None:
    """(conditions, rows) of stepping aside, coming back, and reused prefixes; None where nothing was measured."""
    found = _read("residency.json")
    if not found or found.get("is_tiny"):
        return None
    machine, size = found["machine"], found.get("model", {}).get("bytes")
    about = f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}, {machine['date']}"
    if size:
        about += f", {size / 1e9:.1f} GB bf16"
    return about, list(_residency_rows(found))


def _residency_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    bus, cycles = found.get("bus", {}), found.get("cycles", {})
    again = found.get("second_eviction") or {}
    for key, what in (
        ("evict_s_median", "steps aside for an image model (median of the cycles)"),
        ("return_s_median", "comes back from host memory, and writes 4 tokens"),
    ):
        if key in cycles:
            yield what, _seconds(cycles[key])
    if "return_gb_per_s" in again:
        yield "that return", f"{again['return_gb_per_s']:.1f} GB/s"
    if "pinned_to_device_gb_per_s" in bus:
        yield "the bus itself, pinned memory to the device", f"{bus['pinned_to_device_gb_per_s']:.1f} GB/s"
    for key, what in (
        ("return_from_page_cache", "loads again from files in the page cache, and writes 32 tokens"),
        ("return_from_disk", "loads again from disk, and writes 32 tokens"),
    ):
        if key in found:
            yield what, _seconds(found[key]["return_s"])
    if cycles:
        spread = cycles["free_bytes_spread"] / 1e6
        yield "free device memory after each cycle, largest less smallest", f"{spread:.0f} MB"
        yield "cycles", str(cycles["num_cycles"])
    for row in found.get("prefix_reuse", []):
        if "same_again_ttft_s" in row:
            figure = " / ".join(_seconds(row[f"{name}_ttft_s"]) for name in ("cold", "same_again", "other_end"))
            yield f"TTFT, {row['num_prompt_tokens']} tokens: new / same again / same beginning", figure


def exllamav2() -> tuple[str, Rows] | None:
    """(conditions, rows) of decode tok/s with the ceiling and the bare SDK of the same run beside it."""
    found = _read("exllamav2.json")
    rows = [row for row in found or [] if row.get("kind") == "decode" and "tokens_per_s" in row]
    if not rows:
        return None
    start = next((row for row in found if row.get("kind") == "start"), {})
    device = next((row["name"] for row in found if row.get("kind") == "device"), "GPU")
    return f"{device}, torch {start.get('torch', '?')}, ExLlamaV2 0.3.2, 26.9 B AWQ 4 bit", [
        (
            f"decode tok/s, {row['prompt']} tokens, KV {row['kv_cache']}: here / bare ExLlamaV2 / ceiling",
            f"{row['tokens_per_s']:.1f} / {row['bare_tokens_per_s']:.1f} / {row['ceiling_tokens_per_s']:.0f}",
        )
        for row in rows
    ]
