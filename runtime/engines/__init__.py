"""The table of engines: a row names an engine, its module, its packages and why it cannot run here, if so."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from ..errors import EngineUnavailable
from ..request import ModelSpec
from ..telemetry import Bytes
from . import exllamav2_install
from .base import Footprint, Loader, Loading


def missing(*packages: str) -> Callable[[], str | None]:
    """A check that names the first of `packages` that is not installed, importing none of them."""

    def why() -> str | None:
        for package in packages:
            if importlib.util.find_spec(package) is None:
                return f"the package {package} is not installed"
        return None

    return why


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One engine.

    why_unavailable: None where it can run, else the reason, without importing anything heavy
    install:         one line that would bring it
    """

    name: str
    title: str
    module: str
    formats: tuple[str, ...]
    why_unavailable: Callable[[], str | None]
    install: str


ENGINES: tuple[EngineRow, ...] = (
    EngineRow(
        name="transformers",
        title="Transformers",
        module="transformers",
        formats=("safetensors", "gguf"),
        why_unavailable=missing("torch", "transformers"),
        install="pip install transformers",
    ),
    EngineRow(
        name="exllamav2",
        title="ExLlamaV2",
        module="exllamav2",
        formats=("safetensors",),
        why_unavailable=exllamav2_install.why_unavailable,
        install="python -m runtime doctor",
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


def _module(spec: ModelSpec) -> ModuleType:
    """The module of a spec's engine; the import of the engine's SDK happens here."""
    one = row(spec.engine)
    if reason := one.why_unavailable():
        raise EngineUnavailable(f"{one.title} cannot run here: {reason}. Try: {one.install}")
    return importlib.import_module(f".{one.module}", __package__)


def load(spec: ModelSpec) -> Loading:
    """Load a spec with its engine."""
    loader: Loader = _module(spec).load
    return (yield from loader(spec))


def footprint(spec: ModelSpec) -> Bytes:
    """The bytes that a spec will need, before it is loaded; all 0 where its engine cannot tell."""
    count: Footprint | None = getattr(_module(spec), "footprint", None)
    return count(spec) if count else Bytes()
