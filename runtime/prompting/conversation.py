"""What a user types, and what was said before, as one Prompt."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..engines.base import Encoded
from ..errors import InvalidValue
from ..request import Message, ModelSpec, Prompt, Thinking
from . import presets
from .stop import parse_stop_strings
from .template_choice import built_in_names

NO_PRESET = "none"
OWN_TEMPLATE = "auto"
CLEANING = ("preset", "off", "text")
"""Which cleaning rules apply: the preset's, none, or those that suit any text."""

TEXT_RULES = ("fences", "preamble", "label", "markdown", "quotes")


def template_files(folders: Sequence[str | Path]) -> dict[str, Path]:
    """The user's own chat templates by name, as my/NAME."""
    files = (path for folder in folders for path in sorted(Path(folder).glob("*.jinja")))
    return {f"{presets.OWN}{path.stem}": path for path in files}


def template_choices(folders: Sequence[str | Path]) -> list[str]:
    """What `template` can be: the model's own, a built-in rule, a file of the user's."""
    return [OWN_TEMPLATE, *built_in_names(), *template_files(folders)]


def template_of(choice: str, folders: Sequence[str | Path]) -> str | None:
    """A choice as Prompt.template; raises InvalidValue where there is no such template."""
    files = template_files(folders)
    if choice in files:
        try:
            return files[choice].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidValue(f"The chat template {choice} cannot be read: {error}.") from error
    if choice not in (OWN_TEMPLATE, *built_in_names()):
        raise InvalidValue(f"There is no chat template {choice!r}. There are: {', '.join(template_choices(folders))}.")
    return None if choice == OWN_TEMPLATE else choice


def continued(history: Prompt, answer: str) -> tuple[Message, ...]:
    """The messages of an earlier prompt with the model's answer behind them; raises InvalidValue without an answer."""
    if not answer.strip():
        raise InvalidValue(
            "history is wired, but history_answer is empty. Wire in the text that Generate Text gave to that prompt."
        )
    return (*history.messages, Message.of("assistant", history.answer_prefix + answer))


def compose(
    *,
    system: str,
    user: str,
    preset: presets.Preset | None = None,
    history: tuple[Message, ...] = (),
    cleaning: str = "preset",
    thinking: Thinking = "auto",
    thinking_tags: str = "",
    stop_strings: str = "",
    answer_prefix: str = "",
    template: str | None = None,
    fold_system: bool = False,
    drop_history: bool = False,
) -> Prompt:
    """The Prompt that follows `history`; raises InvalidValue for what cannot be.

    system:        replaces the one of the history, unless it is empty
    cleaning:      one of CLEANING
    thinking_tags: the opening and the closing tag, with a space or on two lines; empty finds them from the model
    stop_strings:  one a line, see parse_stop_strings
    """
    if cleaning not in CLEANING:
        raise InvalidValue(f"clean is {cleaning!r}; it is one of {', '.join(CLEANING)}.")
    if preset is not None:
        system, user = preset.system_text(system), preset.user_text(user)
    if not system and history and history[0].role == "system":
        system = history[0].text
    turns = tuple(message for message in history if message.role != "system")
    tags = tuple(thinking_tags.split())
    if len(tags) not in (0, 2):
        raise InvalidValue(f"thinking_tags holds {len(tags)} tags; give the opening and the closing one, or none.")
    rules = {"preset": preset.clean if preset else (), "off": (), "text": TEXT_RULES}[cleaning]
    return Prompt(
        messages=(*((Message.of("system", system),) if system else ()), *turns, Message.of("user", user)),
        thinking=thinking,
        thinking_tags=(tags[0], tags[1]) if tags else None,
        answer_prefix=answer_prefix,
        stop_strings=parse_stop_strings(stop_strings),
        template=template,
        fold_system=fold_system,
        drop_history=drop_history,
        clean=rules,
    )


def preview(spec: ModelSpec, prompt: Prompt) -> Encoded | None:
    """The prompt as the model of a spec would read it, by its tokenizer alone; None where only a server has that."""
    from .prompter import Prompter

    return Prompter.load(spec.model).encode(prompt) if os.path.exists(spec.model) else None
