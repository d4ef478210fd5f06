"""Connect LLM Server: a recipe for a model on a server, by the name of a profile. No address and no key is a widget."""

from __future__ import annotations

from typing import get_args

from comfy_api.latest import io

from ..runtime import ModelSpec, profiles
from ..runtime.errors import ServerError
from ..runtime.request import WhenIdle
from .schema import advanced, schema
from .types import llm_output, require

SERVED = "(what the server serves)"


class ConnectServer(io.ComfyNode):
    """Hand out a ModelSpec for a server; it is asked for nothing until text is generated."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        try:
            known = profiles.read()
        except ServerError:  # told by validate_inputs; a definition must not fail
            known = {profile.name: profile for profile in profiles.BUILT_IN}
        models = sorted({model for profile in known.values() for model in profile.models})
        return schema(
            node_id="ResidentConnectServer",
            display_name="Connect LLM Server",
            description="Use a model on a server (vLLM, llama.cpp, Ollama, LM Studio ...) in place of Load LLM.",
            search_aliases=["vllm", "ollama", "openai", "lm studio", "llama.cpp server", "api"],
            inputs=[
                io.Combo.Input(
                    "profile",
                    options=list(known),
                    default=profiles.BUILT_IN[0].name,
                    tooltip="Which server. Add others on this machine with: python -m runtime profiles add. "
                    "Addresses and keys stay there and never enter the graph.",
                ),
                io.Combo.Input(
                    "model",
                    options=[SERVED, *models],
                    default=SERVED,
                    tooltip="A model of the profile's list, or the only one that the server serves.",
                ),
                io.String.Input(
                    "other_model",
                    default="",
                    tooltip="A model by the name that the server knows it by; it counts before the menu.",
                ),
                advanced(
                    io.Combo.Input(
                        "when_idle",
                        options=list(get_args(WhenIdle)),
                        default="keep",
                        tooltip="keep: leave the server as it is. sleep, release: a server on this machine that can "
                        "do so frees GPU memory as soon as other models need it, and comes back before the next text.",
                    )
                ),
            ],
            outputs=[llm_output()],
        )

    @classmethod
    def validate_inputs(
        cls, profile: str | None = None, model: str | None = None, other_model: str | None = None
    ) -> bool | str:
        """Menus may have changed since the page was loaded; a wired value arrives as None."""
        if profile is None:
            return True
        try:
            require("profile", [profile], (str,), "a profile's name")
            found = profiles.find(profile)
        except (ServerError, ValueError) as error:
            return str(error)
        name = (other_model or "").strip() or model or SERVED
        if name != SERVED and not found.allows(name):
            return f"Profile {profile!r} does not allow the model {name!r}. It allows: {', '.join(found.models)}."
        return True

    @classmethod
    def execute(cls, profile: str, model: str, other_model: str, when_idle: WhenIdle) -> io.NodeOutput:
        name = other_model.strip() or ("" if model == SERVED else model)
        options = (("when_idle", when_idle),)  # an engine each: one of them may put the server to sleep
        spec = ModelSpec(model=f"{profile}/{name}", engine="openai", options=options, when_idle=when_idle)
        return io.NodeOutput(spec)
