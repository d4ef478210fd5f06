"""Real servers for tests, each started once per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime import ModelSpec, Runtime, profiles
from runtime.engines.base import Engine
from runtime.profiles import Profile
from runtime.request import WhenIdle
from tests.runtime.test_engine_contract import Case, loaded
from tests.servers.llamacpp import LlamaCpp
from tests.servers.process import ServerProcess
from tests.servers.vllm import VLLM, find_python


@pytest.fixture(scope="session")
def vllm(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    """The running vLLM server; a test that kills it starts it again."""
    python = find_python()
    if python is None:
        pytest.skip("no .venv-vllm; `python -m tools.vllm_env` makes it")
    server = VLLM(python, model_path, tmp_path_factory.mktemp("vllm") / "log.txt")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def llamacpp_server(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCpp]:
    """The running llama.cpp server; a test that kills it starts it again."""
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed")
    server = LlamaCpp(gguf_path, tmp_path_factory.mktemp("llamacpp") / "log.txt")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def profile_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for profiles."""
    path = tmp_path / "profiles.json"
    monkeypatch.setenv(profiles.PATH_VARIABLE, str(path))
    return path


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    one = Runtime()
    yield one
    one.close()


@pytest.fixture
def spec(server: ServerProcess, profile_file: Path, model_path: Path) -> Callable[..., ModelSpec]:
    """Write a profile for the file's server, give the spec that uses it."""

    def make(model: str = server.model, *, when_idle: WhenIdle = "keep", **fields) -> ModelSpec:
        tokenizer = None if server.tells_folder else str(model_path)
        fields = {"key": server.key, "tokenizer": tokenizer, **fields}
        profiles.write(Profile(name="box", base_url=server.url, **fields))
        return ModelSpec(model=f"box/{model}", engine="openai", when_idle=when_idle)

    return make


@pytest.fixture
def case(server: ServerProcess, spec: Callable[..., ModelSpec]) -> Case:
    """For the tests of the engine contract: one request at a time where a batch rounds otherwise."""
    if server.gap is None:
        return Case(spec=spec())
    return Case(spec=spec(max_concurrent=1), gap=server.gap)


@pytest.fixture
def warm(case: Case) -> Iterator[Engine]:
    engine = loaded(case)
    yield engine
    engine.close()
