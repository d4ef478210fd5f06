"""Rows for a reader: a plain table, and what changed between two files of rows."""

from __future__ import annotations

from collections.abc import Sequence

from ..journal import short_name
from .rows import Row

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("model", "model", ""),
    ("engine", "engine", ""),
    ("kv_cache", "KV", ""),
    ("num_prompt_tokens", "prompt", "d"),
    ("batch", "batch", "d"),
    ("ttft_cold_s", "TTFT s", ".3f"),
    ("ttft_warm_s", "warm s", ".3f"),
    ("prefill_tokens_per_s", "prefill tok/s", ".0f"),
    ("decode_tokens_per_s", "decode tok/s", ".1f"),
    ("throughput_tokens_per_s", "all tok/s", ".1f"),
    ("percent_of_ceiling", "% of ceiling", ".0f"),
    ("load_s", "load s", ".1f"),
)
COMPARED = ("ttft_cold_s", "ttft_warm_s", "decode_tokens_per_s", "throughput_tokens_per_s")
KEY = ("model", "engine", "device", "kv_cache", "num_prompt_tokens", "batch")


def table_of(rows: Sequence[Row]) -> str:
    """The rows as text, a line each; errors below."""
    text = _aligned(rows, COLUMNS)
    text += [f"! {short_name(row['model'])}: {error}" for row in rows for error in _sentences(row, "errors")]
    text += [f"- {short_name(row['model'])}: {note}" for row in rows for note in _sentences(row, "notes")]
    return "\n".join(text)


QUALITY_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("model", "model", ""),
    ("engine", "engine", ""),
    ("dtype", "dtype", ""),
    ("kv_cache", "KV", ""),
    ("agreement", "same text", ".1%"),
    ("num_equal_texts", "equal texts", "d"),
    ("repetition_rate", "repeated", ".1%"),
    ("perplexity", "perplexity", ".3f"),
    ("kl_mean", "KL", ".2g"),
    ("top1_agreement", "same best", ".1%"),
)


def quality_table(rows: Sequence[Row]) -> str:
    """Rows of `measure_quality` as text: the first model is what the others are compared with."""
    text = _aligned(rows, QUALITY_COLUMNS)
    text += [f"! {short_name(row['model'])}: {row['error']}" for row in rows if row["error"]]
    return "\n".join(text)


def _aligned(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    lines = [[title for _, title, _ in columns]]
    lines += [[_cell(row[key], form) for key, _, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def compare(before: Sequence[Row], after: Sequence[Row]) -> str:
    """What changed beyond noise between rows of the same cell: beyond the range that their repeats span."""
    old = {_key(row): row for row in before}
    lines = []
    for row in after:
        if (was := old.get(_key(row))) is None:
            lines.append(f"{_name(row)}: only in the second file")
            continue
        for figure in COMPARED:
            a, b = was.get(figure), row.get(figure)
            if isinstance(a, float) and isinstance(b, float) and a and abs(b / a - 1) > _noise(was, row):
                lines.append(f"{_name(row)}: {figure} {a:.3f} -> {b:.3f} ({100 * (b / a - 1):+.0f} %)")
    new = {_key(row) for row in after}
    lines += [f"{_name(row)}: only in the first file" for row in before if _key(row) not in new]
    return "\n".join(lines) or "Nothing changed beyond noise."


def _noise(*rows: Row) -> float:
    """The widest relative spread of the rows' repeats, 5 % at least."""
    spreads = [0.05]
    for row in rows:
        low, middle, high = (row.get(f"decode_tokens_per_s{end}") for end in ("_min", "", "_max"))
        if isinstance(low, float) and isinstance(middle, float) and isinstance(high, float) and middle:
            spreads.append((high - low) / middle)
    return max(spreads)


def _key(row: Row) -> tuple[object, ...]:
    return (short_name(row["model"]), *(row.get(key) for key in KEY[1:]))


def _name(row: Row) -> str:
    return f"{short_name(row['model'])} ({row['engine']}, {row['num_prompt_tokens']} tokens x {row['batch']})"


def _sentences(row: Row, key: str) -> list[str]:
    found = row.get(key)
    return [str(one) for one in found] if isinstance(found, list) else []


def _cell(value: object, form: str) -> str:
    if value is None:
        return "-"
    return format(value, form) if form else short_name(value)
