"""Which chat template a prompt asks for: the model's own, a built-in rule, or a text. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import TemplateFailed

BUILT_IN = Path(__file__).with_name("templates")


def built_in_names() -> tuple[str, ...]:
    """The names of the built-in rules, sorted."""
    return tuple(sorted(path.stem for path in BUILT_IN.glob("*.jinja")))


def choices() -> str:
    """What a user can set `template` to, for error messages."""
    return f"one of the built-in rules ({', '.join(built_in_names())}), or the text of a Jinja template"


def resolve(wanted: str | None, own: Mapping[str, str]) -> str:
    """The source of the template to use; raises TemplateFailed with the choices.

    wanted: a name or the text of a template; None for the model's own
    own:    the model's templates by name; the main one is "default"
    """
    if wanted is None:
        if "default" in own:
            return own["default"]
        if len(own) == 1:
            return next(iter(own.values()))
        named = f", one of its own ({', '.join(sorted(own))})" if own else ""
        problem = "has several chat templates and none is the default" if own else "has no chat template"
        raise TemplateFailed(f"This model {problem}. Set `template` in LLM Prompt to {choices()}{named}.")
    if wanted in own:
        return own[wanted]
    if wanted in built_in_names():
        return (BUILT_IN / f"{wanted}.jinja").read_text(encoding="utf-8")
    if "{{" in wanted or "{%" in wanted:
        return wanted
    raise TemplateFailed(f"There is no chat template {wanted!r}. Set `template` to {choices()}.")
