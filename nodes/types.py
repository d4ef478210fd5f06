"""Socket types. Each carries a frozen value: a ModelSpec, a Prompt, a Sampling. A report is a STRING of JSON."""

from __future__ import annotations

from comfy_api.latest import io

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
