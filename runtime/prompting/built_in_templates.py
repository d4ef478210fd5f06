"""The chat templates that come with us: their names and their text, without a template engine."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("templates")


def built_in_names() -> tuple[str, ...]:
    """The names of the built-in rules, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))


def read_built_in(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
