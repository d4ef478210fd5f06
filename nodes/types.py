"""Socket types. Each carries a frozen value: a ModelSpec, a Prompt, a Sampling. A report is a STRING of JSON."""

from __future__ import annotations

from collections.abc import Sequence

from comfy_api.latest import io

from ..runtime import ModelSpec
from ..runtime.errors import InvalidValue
from . import host

LLM = io.Custom("RESIDENT_LLM")
PROMPT = io.Custom("RESIDENT_PROMPT")
SAMPLING = io.Custom("RESIDENT_SAMPLING")
ANY = io.Custom(host.ANY_TYPE)


def llm_output() -> io.Output:
    """The output of a loader."""
    tooltip = "The choice of model, for Generate Text. It costs nothing to pass on."
    return LLM.Output("llm", display_name="llm", tooltip=tooltip)


def passed_on() -> io.Output:
    """The output that gives the wired value on."""
    return ANY.Output("passed_on", display_name="passed_on", tooltip="The wired value.")


def require(name: str, values: Sequence[object], kinds: tuple[type, ...], wanted: str) -> None:
    """Raise InvalidValue for what other packs' switches let through: nothing at all, or a value of another kind."""
    for i, value in enumerate(values):
        if not isinstance(value, kinds):
            what = "nothing" if value is None else f"a value of the kind {type(value).__name__}"
            where = f"Item {i + 1} of {name}" if len(values) > 1 else name
            raise InvalidValue(f"{where} is {what}. Wire in {wanted}.")


def require_model(name: str, values: Sequence[object]) -> None:
    """Raise InvalidValue unless each value is a loader's."""
    require(name, values, (ModelSpec,), "Load LLM or Connect LLM Server")
