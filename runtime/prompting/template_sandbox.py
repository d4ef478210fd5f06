"""A Jinja environment for templates of strangers: they reach nothing outside, and what they do and make has an end.

Jinja's own sandbox keeps a template from what it must not touch. It does not keep `{{ "x" * 10**10 }}` from filling
all memory, nor loops inside loops from running for hours. Here every block that runs, every turn of a loop and every
character that is made is charged against an allowance, before it is made.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

ALLOWANCE = 4_000_000
"""Steps and characters of a template that is rendered for nothing; `ChatTemplate` adds more for what it is given."""

BLOCK = 8
"""What running a block once, or writing out a list or a number, costs in characters."""

SIZED = (str, list, tuple, dict, set, frozenset, range)
LEFT_OUT = ("urlize", "xmlattr", "pprint", "wordwrap")
"""Filters for web pages, of no use in a prompt, each of which can make much of little."""

AMPLIFIERS = ("encode", "to_bytes", "translate")
"""Methods of text and numbers that are left out for the same reason."""

BY_REFERENCE = frozenset(
    "attr batch count d default dictsort first groupby items last length list map max min random reject rejectattr "
    "reverse select selectattr slice sort sum unique".split()
)
"""Filters that hand values on as they are; all others write them out as text."""

PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


class Exhausted(jinja2.TemplateError):
    """The template has used up its allowance."""


class Allowance(threading.local):
    """What a template may still do; each thread renders with its own."""

    left = ALLOWANCE

    def charge(self, cost: int) -> None:
        self.left -= cost
        if self.left < 0:
            raise Exhausted

    def charge_text(self, value: object) -> None:
        """Charge for a value written out as text; a list that holds another twice is charged for it twice."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, Mapping):
            for pair in value.items():
                self.charge_text(pair)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.charge(BLOCK)
            for one in value:
                self.charge_text(one)
        else:
            self.charge(BLOCK)


class _Code(jinja2.compiler.CodeGenerator):
    """Compiles what the sandbox cannot intercept by itself: blocks, loops, slices and `~`."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        self.writeline(f"environment.allowance.charge({BLOCK})")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        counted = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("counted"), [node.iter], [], None, None)
        counted.set_lineno(node.lineno)
        node.iter = counted
        super().visit_For(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        if not isinstance(node.arg, jinja2.nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.counted(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Formatter(SandboxedFormatter):
    """`str.format`, whose widths are charged."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        super().__init__(environment)
        self._allowance = environment.allowance

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._allowance.charge_text(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        for number in re.findall(r"\d+", format_spec):
            self._allowance.charge(int(number))
        return super().format_field(value, format_spec)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with an allowance."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.allowance = Allowance()
        self.finalize = self._shown
        del self.globals["lipsum"]
        for name in LEFT_OUT:
            del self.filters[name]

    def bound_filters(self) -> None:
        """Charge for all filters that there are by now."""
        for name, made in self.filters.items():
            self.filters[name] = self._bounded(name, made)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in AMPLIFIERS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._charge_percent(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, SIZED) and isinstance(right, SIZED):
            self.allowance.charge(len(left) + len(right))
        elif operator == "*":
            self.allowance.charge(_product(left, right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.allowance.charge(left.bit_length() * max(right, 0) // 8)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps the methods that it sandboxes itself
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "format":
                return _Formatter(self).vformat(owner, args, kwargs)
            if name == "format_map":
                return _Formatter(self).vformat(owner, (), args[0])
            args = self._charge_method(owner, name, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def _charge_method(
        self, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Charge for a method of a text; give its arguments back, what could be read once only as a list."""
        self.allowance.charge(len(owner))
        if name == "join" and args and not isinstance(args[0], str):
            args = (list(self.counted(args[0])),)
            self.allowance.charge(len(owner) * len(args[0]))
            self.allowance.charge_text(args[0])
        elif name == "replace" and len(args) > 1:
            self.allowance.charge(owner.count(args[0]) * len(args[1]))
        else:
            self._charge_numbers((*args, *kwargs.values()), 1 + owner.count("\t"))
        return args

    def _charge_numbers(self, values: Iterable[Any], times: int) -> None:
        for value in values:
            if isinstance(value, int):
                self.allowance.charge(abs(value) * times)

    def _charge_percent(self, text: str, args: Sequence[Any]) -> None:
        for width in (one for pair in PERCENT.findall(text) for one in pair if one):
            self._charge_numbers(args if width == "*" else (int(width),), 1)
        self.allowance.charge_text(text)
        self.allowance.charge_text(tuple(args))

    def _bounded(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, charging for what it takes and what it makes."""
        at = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, rest = args[at], (*args[at + 1 :], *kwargs.values())
            if name == "join" and not isinstance(value, SIZED):
                value = list(self.counted(value))
                args = (*args[:at], value, *args[at + 1 :])
            self._charge_filter(name, value, rest)
            result = made(*args, **kwargs)
            if isinstance(result, SIZED):
                self.allowance.charge(len(result))
            return result

        return bounded

    def _charge_filter(self, name: str, value: Any, rest: Sequence[Any]) -> None:
        if name in BY_REFERENCE:
            self.allowance.charge(len(value) if isinstance(value, SIZED) else 1)
            self._charge_numbers(rest, 1)
            if name == "sum" and any(isinstance(one, SIZED) and not isinstance(one, str) for one in rest):
                raise SecurityError("sum adds numbers only.")
            return
        self.allowance.charge_text(value)
        num_lines = 1 + str(value).count("\n") if isinstance(value, str) else 1
        self._charge_numbers(rest, num_lines)
        texts = [one for one in rest if isinstance(one, str)]
        if name == "format":
            self._charge_percent(str(value), rest)
        elif name == "replace" and len(texts) > 1:
            self.allowance.charge(str(value).count(texts[0]) * len(texts[1]))
        elif name in ("indent", "join"):
            times = num_lines if name == "indent" else len(value) if isinstance(value, SIZED) else 1
            self.allowance.charge(sum(map(len, texts)) * times)

    def counted(self, value: Any) -> Any:
        """The same values; their number is charged, at once where it is known, else one after another."""
        if not isinstance(value, SIZED):
            return self._one_by_one(value) if isinstance(value, Iterator) else value
        self.allowance.charge(len(value))
        return value

    def _one_by_one(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.allowance.charge(1)
            yield value

    def joined(self, parts: Sequence[Any]) -> str:
        """The parts as one text: what `~` makes."""
        self.allowance.charge_text(tuple(parts))
        return "".join(map(str, parts))

    def concat(self, parts: Iterable[str]) -> str:
        """The parts as one text: what templates, macros and blocks make."""
        kept = []
        for part in parts:
            self.allowance.charge(len(part))
            kept.append(part)
        return "".join(kept)

    def _shown(self, value: Any) -> Any:
        """What stands between {{ and }}, before it becomes text."""
        self.allowance.charge_text(value)
        return value


def _product(left: Any, right: Any) -> int:
    """The size of a product: of a text or list, or of a whole number in bytes."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            return len(value) * max(times, 0)
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 8
    return 0
