"""Real servers for tests, each started once per run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import profiles
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


@pytest.fixture
def profile_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for profiles."""
    path = tmp_path / "profiles.json"
    monkeypatch.setenv(profiles.PATH_VARIABLE, str(path))
    return path
