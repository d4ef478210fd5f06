"""A picture of one prompt: when models came and went, when text was written, and what was held meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .journal import Mark, Run, short_name
from .telemetry import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIZE = (960, 400)
LEFT, RIGHT, TOP, LANE = 150, 936, 56, 34
MEMORY = (TOP + 3 * LANE + 24, 344)
COLOURS = {"load": "#4e9af1", "return": "#7fb8f7", "evict": "#f1a24e", "unload": "#e0655f", "run": "#5bc489"}
LANES = {"load": 0, "return": 0, "run": 1, "evict": 2, "unload": 2}
LANE_TITLES = ("load, return", "generate", "evict, unload")
INK, PAPER, GRID, FILL = "#d8d8d8", "#1e1e1e", "#3a3a3a", "#2d4a66"


def timeline_of(began: float, ended: float, marks: Sequence[Mark], runs: Sequence[Run]) -> Image:
    """An RGB image, 960 x 400, from `began` to `ended` in seconds of the one clock; raises ImportError without Pillow.

    What lies between the bars is the time of other nodes. Memory is that of our models by the runtime's ledger.
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(image)
    length = max(ended - began, 1e-3)
    draw.text((20, 16), f"Language models in this prompt: {length:.2f} s", fill=INK)
    _grid(draw, length)
    bars: list[tuple[str, float, float, str]] = [
        (mark.kind, mark.at - mark.seconds, mark.at, " ".join(short_name(mark.model).split())) for mark in marks
    ]
    bars += [("run", run.began_at, run.ended_at or ended, f"{run.num_tokens} tokens") for run in runs]
    for kind, start, end, label in bars:
        _bar(draw, kind, (start - began) / length, (end - began) / length, label)
    _memory(draw, began, length, marks)
    return image


def _x(share: float) -> float:
    return LEFT + min(max(share, 0.0), 1.0) * (RIGHT - LEFT)


def _grid(draw: ImageDraw, length: float) -> None:
    for lane, title in enumerate(LANE_TITLES):
        draw.text((20, TOP + lane * LANE + 9), title, fill=INK)
        draw.line((LEFT, TOP + (lane + 1) * LANE, RIGHT, TOP + (lane + 1) * LANE), fill=GRID)
    for step in range(5):
        x = _x(step / 4)
        draw.line((x, TOP, x, MEMORY[1]), fill=GRID)
        draw.text((x - 14, MEMORY[1] + 10), f"{length * step / 4:.2f} s", fill=INK)


def _bar(draw: ImageDraw, kind: str, start: float, end: float, label: str) -> None:
    left, right = _x(start), max(_x(end), _x(start) + 3)
    y = TOP + LANES[kind] * LANE
    draw.rectangle((left, y + 6, right, y + LANE - 6), fill=COLOURS[kind])
    room = RIGHT - right - 6
    if draw.textlength(label) < right - left - 8:
        draw.text((left + 4, y + 10), label, fill=PAPER)
    elif draw.textlength(label) < room:
        draw.text((right + 4, y + 10), label, fill=COLOURS[kind])


def _memory(draw: ImageDraw, began: float, length: float, marks: Sequence[Mark]) -> None:
    """Bytes of all our models as a stair; before the first mark what was held is told by what that mark changed."""
    upper, lower = MEMORY
    draw.text((20, (upper + lower) // 2 - 6), "held by models", fill=INK)
    draw.line((LEFT, lower, RIGHT, lower), fill=GRID)
    if not marks:
        return
    first = marks[0]
    is_arrival = first.kind in ("load", "return")
    before = first.held_bytes - first.num_bytes if is_arrival else first.held_bytes + first.num_bytes
    stair = [(0.0, max(0, before)), *(((mark.at - began) / length, mark.held_bytes) for mark in marks)]
    top = max(held for _, held in stair) or 1
    draw.text((20, upper), format_bytes(top), fill=INK)
    for (start, held), (end, _) in zip(stair, [*stair[1:], (1.0, 0)]):
        if held:
            y = lower - (lower - upper) * held / top
            draw.rectangle((_x(start), y, _x(end), lower), fill=FILL)
            draw.line((_x(start), y, _x(end), y), fill=COLOURS["load"], width=2)
