"""Presets: ready system texts for image and video work, bundled and the user's own.

A preset is a Markdown file: a head of `name: value` lines between two lines of `---`, then the system text.
The head may hold `title`, `about`, `clean` (names of cleaning rules, with commas) and `user`, a pattern in which
{text} stands for what the user wrote. The file's name is its id, and stays the same for ever.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidValue
from .clean import RULES

BUNDLED = Path(__file__).with_name("presets")
OWN = "my/"
"""What the ids of the user's own presets begin with, so that they never hide a bundled one."""

_HEAD = ("title", "about", "clean", "user")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A system text with what belongs to it.

    user:  pattern for the user's words; {text} stands for them
    clean: names of cleaning rules for the answer
    """

    id: str
    title: str
    about: str
    system: str
    user: str = "{text}"
    clean: tuple[str, ...] = ()

    def system_text(self, more: str) -> str:
        """The preset's text, followed by the user's own system text."""
        return "\n\n".join(text for text in (self.system, more.strip()) if text)

    def user_text(self, text: str) -> str:
        """The user's words in the preset's pattern, taken literally."""
        return self.user.replace("{text}", text)


def parse(text: str, preset_id: str) -> Preset:
    """Read a preset; raises InvalidValue with the place of the fault."""
    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (line.strip() for line in lines[1:]):
        raise InvalidValue(f"The preset {preset_id} must begin with a head between two lines of ---.")
    end = next(at for at, line in enumerate(lines) if at and line.strip() == "---")
    head: dict[str, str] = {}
    for number, line in enumerate(lines[1:end], start=2):
        name, colon, value = line.partition(":")
        if line.strip():
            if not colon or name.strip() not in _HEAD:
                raise InvalidValue(
                    f"The preset {preset_id} has {line.strip()!r} in line {number}; its head holds {', '.join(_HEAD)}."
                )
            head[name.strip()] = value.strip()
    clean = tuple(name.strip() for name in head.get("clean", "").split(",") if name.strip())
    if unknown := [name for name in clean if name not in {rule.name for rule in RULES}]:
        raise InvalidValue(f"The preset {preset_id} has the unknown cleaning rule {unknown[0]!r}.")
    user = head.get("user", "{text}").replace("\\n", "\n")
    if "{text}" not in user:
        raise InvalidValue(
            f"The preset {preset_id} has a `user` without {{text}}, so what the user writes would be lost."
        )
    return Preset(
        id=preset_id,
        title=head.get("title", preset_id),
        about=head.get("about", ""),
        system="\n".join(lines[end + 1 :]).strip(),
        user=user,
        clean=clean,
    )


def find(folders: Sequence[str | Path] = ()) -> dict[str, Path]:
    """The files of all presets by id, sorted: the bundled ones, then those in the user's folders, as my/NAME."""
    bundled = {path.stem: path for path in sorted(BUNDLED.glob("*.md"))}
    own = {f"{OWN}{path.stem}": path for folder in folders for path in sorted(Path(folder).glob("*.md"))}
    return bundled | own


def load(preset_id: str, folders: Sequence[str | Path] = ()) -> Preset:
    """A preset by id; raises InvalidValue where there is none, or where its file is faulty."""
    files = find(folders)
    if preset_id not in files:
        raise InvalidValue(f"There is no preset {preset_id!r}. Presets are: {', '.join(files)}.")
    try:
        return _read(files[preset_id], os.stat(files[preset_id]).st_mtime_ns, preset_id)
    except OSError as error:
        raise InvalidValue(f"The preset {preset_id} cannot be read: {error.strerror}.") from error


@functools.lru_cache(maxsize=256)
def _read(path: Path, mtime_ns: int, preset_id: str) -> Preset:
    """The preset of a file in this state: a node's menu asks for all of them again and again."""
    try:
        return parse(path.read_text(encoding="utf-8"), preset_id)
    except UnicodeDecodeError as error:
        raise InvalidValue(f"The preset {preset_id} is not UTF-8: {error}.") from error
