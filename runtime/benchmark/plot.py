"""A plot of benchmark rows: decode rate over prompt length, a line for each model, its ceiling dashed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..journal import short_name
from .rows import Row

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIZE = (960, 540)
MARGIN = (80, 56, 24, 64)
COLOURS = ("#4e9af1", "#f1a24e", "#5bc489", "#d66bb0", "#b3a1f5", "#e0655f")
INK, PAPER, GRID = "#d8d8d8", "#1e1e1e", "#3a3a3a"


def plot_of(rows: Sequence[Row]) -> Image:
    """An RGB image of 960 x 540; raises ImportError without Pillow."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(image)
    lines = _lines(rows)
    draw.text((MARGIN[0], 16), "Output tokens per second over prompt length", fill=INK)
    if not lines:
        draw.text((MARGIN[0], MARGIN[1]), "No row has figures.", fill=INK)
        return image
    lengths = sorted({x for points in lines.values() for x, _, _ in points})
    top = 1.1 * max(y for points in lines.values() for _, y, _ in points)
    _axes(draw, lengths, top)
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(_x(x, lengths), _y(y, top)) for x, y, _ in points]
        if len(places) > 1:
            draw.line(places, fill=colour, width=3)
        for (x, y), (_, rate, percent) in zip(places, points):
            draw.ellipse((x - 5, y - 5, x + 5, y + 5), fill=colour)
            label = f"{rate:.1f}" + (f" ({percent:.0f} %)" if percent is not None else "")
            draw.text((x + 8, y - 14), label, fill=colour)
        draw.text((MARGIN[0] + 8 + (number % 2) * 430, SIZE[1] - 34 + 14 * (number // 2)), name, fill=colour)
    return image


def _lines(rows: Sequence[Row]) -> dict[str, list[tuple[int, float, float | None]]]:
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    for row in rows:
        rate, percent = row["throughput_tokens_per_s"], row["percent_of_ceiling"]
        length = row["num_prompt_tokens"]
        if row["batch"] == 1:
            rate = row["decode_tokens_per_s"]
        if isinstance(rate, float) and isinstance(length, int):
            name = f"{short_name(row['model'])}, {row['engine']}, KV {row['kv_cache']}, batch {row['batch']}"
            share = percent if isinstance(percent, float) else None
            lines.setdefault(name, []).append((length, rate, share))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()}


def _axes(draw: ImageDraw, lengths: list[int], top: float) -> None:
    left, _, right, bottom = MARGIN[0], MARGIN[1], SIZE[0] - MARGIN[2], SIZE[1] - MARGIN[3]
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        draw.line((left, y, right, y), fill=GRID)
        draw.text((12, y - 6), f"{value:.1f}", fill=INK)
    for length in lengths:
        draw.text((_x(length, lengths) - 12, bottom + 8), str(length), fill=INK)


def _x(length: int, lengths: list[int]) -> float:
    left, right = MARGIN[0] + 24, SIZE[0] - MARGIN[2] - 110
    at = lengths.index(length) / max(1, len(lengths) - 1)
    return left + at * (right - left)


def _y(value: float, top: float) -> float:
    upper, lower = MARGIN[1], SIZE[1] - MARGIN[3]
    return lower - (lower - upper) * value / top
