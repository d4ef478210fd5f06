"""The menu of models: the names in it, and what a name that a workflow holds stands for."""

from __future__ import annotations

import os

from ..runtime.errors import InvalidValue, ModelNotFound
from . import host, models
from .types import require

NO_MODEL = "(no model found)"


def names(*, with_gguf: bool = True) -> list[str]:
    """The models that can be chosen."""
    found = models.listing(host.llm_folders()).models
    return [name for name in found if with_gguf or not name.lower().endswith(".gguf")]


def path_of(name: str) -> str:
    """The real path of a model of the menu; raises ModelNotFound with a sentence that tells where to put one."""
    found = models.listing(host.llm_folders())
    require("model", [name], (str,), "the name of a model of the menu")
    if name in found.models:
        return os.path.realpath(found.models[name])
    where = " or ".join(host.llm_folders())
    if not found.models:
        from ..runtime.models.suggestions import advice  # only for this sentence

        raise ModelNotFound(
            f"There is no language model in {where}. Put a model folder (config.json and safetensors) or "
            f"a GGUF file there, then refresh the page. {advice(host.card_bytes(), host.llm_folders()[0])}"
        )
    there = ", ".join(list(found.models)[:5]) + (" ..." if len(found.models) > 5 else "")
    if name in found.folders:
        raise ModelNotFound(
            f"The folder {name!r} holds no model: neither config.json nor safetensors nor GGUF. There are: {there}."
        )
    raise ModelNotFound(
        f"The model {name!r} is not in {where}. There are: {there}. Pick one of them, or put it there and "
        "refresh the page."
    )


def check(*chosen: str | None) -> bool | str:
    """For `validate_inputs`: the menu may have changed since the page was loaded; a wired name arrives as None."""
    try:
        for name in chosen:
            if name is not None:
                path_of(name)
    except (ModelNotFound, InvalidValue) as error:
        return str(error)
    return True


def fingerprint(*chosen: str | None) -> str:
    """For `fingerprint_inputs`: another state of a chosen model's files is another model."""
    host.begin_prompt()
    return revision(*(path_of(name) for name in chosen if name is not None))


def revision(*paths: str) -> str:
    """A short mark of the state of all these models' files."""
    return "-".join(map(models.revision, paths))
