"""Fixtures for all tests: the real model, the real ComfyUI, the real browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.host.comfy import ComfyUI
from tools.chromium import find_chromium
from tools.fault import Fault
from tools.frontend import frontend
from tools.model import GGUF, MODELS
from tools.model import NAME as MODEL_NAME


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip browser tests where there is no Chromium, saying so."""
    if find_chromium() is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="no chromium; install it, or name one in CHROMIUM"))


@pytest.fixture
def num_calls() -> Callable[[Callable[[], object]], int]:
    """How many Python calls, steps of generators included, something takes: a cost that no busy machine changes."""

    def measure(act: Callable[[], object]) -> int:
        calls = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            act()
        finally:
            sys.setprofile(None)
        return calls

    return measure


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The folder of SmolLM2-135M-Instruct in fp32."""
    path = Path(os.environ.get("RESIDENT_TEST_MODEL") or MODELS / MODEL_NAME)
    if not (path / "config.json").is_file():
        pytest.skip(f"no {path}; `make model` puts it there")
    return path


@pytest.fixture(scope="session")
def gguf_path(model_path: Path) -> Path:
    """The GGUF file that the model was converted from, beside its folder."""
    path = model_path.parent / GGUF
    if not path.is_file():
        pytest.skip(f"no {path}; `make model` puts it there")
    return path


@pytest.fixture(scope="session")
def comfy_with(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[..., ComfyUI]]:
    """Get a running server by its flags and settings; one that was asked for before is shared."""
    servers: dict[str, ComfyUI] = {}

    def get(
        *extra_args: str,
        settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        packs: Mapping[str, Path] | None = None,
        models: Sequence[Path] | None = None,
    ) -> ComfyUI:
        key = repr((extra_args, settings, env, packs, models))
        server = servers.get(key)
        if server is None or not server.is_running():
            if models is None:
                models = [request.getfixturevalue("model_path")]
            server = servers[key] = ComfyUI(
                tmp_path_factory.mktemp("comfy"),
                extra_args=extra_args,
                settings=settings,
                env=env,
                packs=packs,
                models=models,
            )
            server.start()
        return server

    try:
        yield get
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture(scope="session")
def newest_comfy(comfy_with: Callable[..., ComfyUI]) -> ComfyUI:
    """The shared server with the newest page that can be had."""
    try:
        return comfy_with("--front-end-root", str(frontend()))
    except Fault as fault:
        pytest.skip(str(fault))


@pytest.fixture
def comfy(comfy_with: Callable[..., ComfyUI]) -> ComfyUI:
    """The shared server with this pack and the real model, in its default settings."""
    return comfy_with()
