"""The table of engines: a row names an engine, its module, its packages and why it cannot run here, if so."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from ..errors import EngineUnavailable, ModelUnsupported
from ..models import exllamav2_config, quantised
from ..models.info import ModelInfo, read_model
from ..models.transformers_types import why_unknown
from ..request import ModelSpec
from ..shell import for_shell
from ..telemetry import Bytes
from . import exllamav2_install
from .base import Footprint, Loader, Loading, Settle


def missing(*packages: str) -> Callable[[], str | None]:
    """A check that names the first of `packages` that is not installed, importing none of them."""

    def why() -> str | None:
        for package in packages:
            if importlib.util.find_spec(package) is None:
                return f"the package {package} is not installed"
        return None

    return why


def anything(info: ModelInfo) -> str | None:
    """A check that has nothing against any model of the engine's formats."""
    return None


def not_for_transformers(info: ModelInfo) -> str | None:
    """A check for a type that the installed transformers does not know, or a quantisation without its package."""
    return why_unknown(info) or quantised.why_not_in_transformers(info)


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One engine.

    formats:         what it reads; empty where a server, or a script, has the model
    why_unavailable: None where it can run, else the reason, without importing anything heavy
    install:         one line that would bring it
    why_unsupported: None where it can run this model of one of its formats, else the reason
    settles:         the module with its `settle`, lighter than its SDK; empty where a spec's "auto" is the server's
    """

    name: str
    title: str
    module: str
    formats: tuple[str, ...]
    why_unavailable: Callable[[], str | None]
    install: str
    why_unsupported: Callable[[ModelInfo], str | None] = anything
    settles: str = ""

    def why_not(self, info: ModelInfo) -> str | None:
        """Why this engine cannot run this model on this machine; None if nothing speaks against it."""
        if not self.formats:
            return "it does not read model files"
        if info.format not in self.formats:
            return f"it reads {' and '.join(self.formats)}, and this is {info.format}"
        return self.why_unsupported(info) or self.why_unavailable()


ENGINES: tuple[EngineRow, ...] = (
    EngineRow(
        name="llamacpp",
        title="llama.cpp",
        module="llamacpp",
        formats=("gguf",),
        why_unavailable=missing("xllamacpp", "aiohttp"),
        install="pip install xllamacpp",
        settles="llamacpp",
    ),
    EngineRow(
        name="transformers",
        title="Transformers",
        module="transformers",
        formats=("safetensors", "gguf"),
        why_unavailable=missing("torch", "transformers"),
        install="pip install transformers",
        why_unsupported=not_for_transformers,
        settles="transformers_plan",
    ),
    EngineRow(
        name="exllamav2",
        title="ExLlamaV2",
        module="exllamav2",
        formats=("safetensors",),
        why_unavailable=exllamav2_install.why_unavailable,
        why_unsupported=exllamav2_config.why_unsupported,
        install="python -m runtime doctor",
        settles="exllamav2_load",
    ),
    EngineRow(
        name="openai",
        title="Server (OpenAI-compatible)",
        module="openai",
        formats=(),
        why_unavailable=missing("aiohttp"),
        install="pip install aiohttp",
    ),
    EngineRow(
        name="scripted",
        title="Scripted (for tests)",
        module="scripted",
        formats=(),
        why_unavailable=missing(),
        install="",
    ),
)


def row(name: str) -> EngineRow:
    """The row of an engine by name; raises EngineUnavailable with the names there are."""
    for one in ENGINES:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in ENGINES)
    raise EngineUnavailable(f"There is no engine {name!r}. Engines are: {names}.")


def choose(spec: ModelSpec) -> EngineRow:
    """The row that a spec names; for "auto" the first of the table that can run the model on this machine.

    Raises ModelUnsupported with each engine's reason if none can.
    """
    if spec.engine != "auto":
        return row(spec.engine)
    info = read_model(spec.model)
    reasons = {one.name: one.why_not(info) for one in ENGINES if one.formats}
    for name, reason in reasons.items():
        if reason is None:
            return row(name)
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ModelUnsupported(f"No engine can run {spec.model} here. {told}. Install one of them, or use a server.")


def settle(spec: ModelSpec) -> ModelSpec:
    """The spec with what its engine makes of every "auto" here: specs that come out equal load equal models."""
    one = choose(spec)
    spec = replace(spec, engine=one.name)
    if not one.settles or one.why_unavailable():
        return spec
    settles: Settle = importlib.import_module(f".{one.settles}", __package__).settle
    return settles(spec)


def _module(spec: ModelSpec) -> ModuleType:
    """The module of a spec's engine; the import of the engine's SDK happens here."""
    one = choose(spec)
    if reason := one.why_unavailable():
        raise EngineUnavailable(f"{one.title} cannot run here: {reason}. Try: {for_shell(one.install)}")
    return importlib.import_module(f".{one.module}", __package__)


def load(spec: ModelSpec) -> Loading:
    """Load a spec with its engine."""
    loader: Loader = _module(spec).load
    return (yield from loader(spec))


def footprint(spec: ModelSpec) -> Bytes:
    """The bytes that a spec will need, before it is loaded; all 0 where its engine cannot tell."""
    count: Footprint | None = getattr(_module(spec), "footprint", None)
    return count(spec) if count else Bytes()
