"""Chat templates: render messages with a model's own rule, in a sandbox, with what transformers gives to templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from ..errors import TemplateFailed
from ..request import Option
from .template_choice import choices
from .template_sandbox import ALLOWANCE, BoundedEnvironment, Exhausted

Messages = Sequence[tuple[str, str]]
"""(role, text) of each turn."""

PER_CHARACTER, PER_MESSAGE = 64, 20_000
"""What a template may do more for each character and message that it is given."""

MAX_JSON_WIDTH = 16


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads it from the class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    widths = [len(one) if isinstance(one, str) else one for one in (indent, *(separators or ())) if one is not None]
    if max(widths, default=0) > MAX_JSON_WIDTH:
        raise jinja2.TemplateError(f"tojson takes an indent and separators of up to {MAX_JSON_WIDTH} characters.")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.bound_filters()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """One template, compiled.

    title:     how a message names it
    variables: the names that it reads and does not set itself, such as `enable_thinking`
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], title: str = "The chat template") -> None:
        self._allowance = (environment := _environment()).allowance
        self._title = title
        try:
            self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFailed(
                f"The chat template cannot be read: {error.message} (line {error.lineno}). Correct it, or choose "
                f"another one: {choices()}."
            ) from error
        except Exception as error:  # constants are computed here already: whatever they raise is the template's fault
            raise TemplateFailed(
                f"The chat template cannot be read: {str(error) or type(error).__name__}. Correct it, or choose "
                f"another one: {choices()}."
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Messages, options: Mapping[str, Option], *, add_generation_prompt: bool = True) -> str:
        """The prompt as text, control tokens included; raises TemplateFailed with the template's own words."""
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **options}
        variables["messages"] = [{"role": role, "content": text} for role, text in messages]
        variables["add_generation_prompt"] = add_generation_prompt
        size = len(self.source) + sum(len(text) for _, text in messages)
        self._allowance.left = ALLOWANCE + PER_CHARACTER * size + PER_MESSAGE * len(messages)
        try:
            return self._template.render(variables)
        except Exhausted as error:
            raise TemplateFailed(
                f"{self._title} was stopped: it makes more text, or does more, than {len(messages)} messages with "
                f"{size} characters can need. Choose another one: {choices()}."
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise TemplateFailed(
                f"The chat template does something that is not safe, so it was stopped: {error} Choose another "
                f"one: {choices()}."
            ) from error
        except Exception as error:  # the template is foreign code: whatever it raises is its own fault
            raise TemplateFailed(
                f"The chat template refuses these messages: {str(error) or type(error).__name__}. Change the messages, "
                f"or choose another template: {choices()}."
            ) from error


def end_of_turn(render: Callable[..., str]) -> str:
    """The text that the template puts behind an assistant's turn; empty where it cannot be told."""
    answer = "\ue000answer\ue001"
    try:
        text = render([("user", "Hello."), ("assistant", answer)], {}, add_generation_prompt=False)
    except TemplateFailed:
        return ""
    _, found, after = text.rpartition(answer)
    return after if found else ""
