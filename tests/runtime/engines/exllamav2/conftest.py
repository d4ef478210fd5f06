"""Fixtures: the adapter on a scripted SDK, and on the real SDK's Python where that lies unpacked."""

import json
from types import SimpleNamespace

import pytest

from runtime import ModelSpec
from runtime.engines import exllamav2, exllamav2_load
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.models.awq_writer import TINY_QWEN2, tiny_qwen2_weights, write_folder

SDKS = {"scripted": cpu.scripted_sdk, "real": cpu.real_sdk}


@pytest.fixture(params=list(SDKS))
def sdk(request):
    if request.param == "real" and (reason := cpu.real_folder()[1]):
        pytest.skip(reason)
    return SDKS[request.param]()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A 16-bit folder: the adapter reads its config and headers; the model of exllamav2_cpu does the rest."""
    folder = write_folder(tmp_path_factory.mktemp("exl2") / "model", TINY_QWEN2, tiny_qwen2_weights())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def open_engine(folder, sdk, monkeypatch):
    """Load an engine on the CPU; keywords are the spec's, `stop_ids` the prompter's."""
    opened = []
    monkeypatch.setattr(exllamav2_load.gc, "collect", lambda: 0)

    def open_it(*, stop_ids=(), model=None, context_len=1024, **fields):
        monkeypatch.setattr(exllamav2, "resolve_device", lambda _: "cpu")
        monkeypatch.setattr(exllamav2, "open_sdk", lambda: sdk)
        monkeypatch.setattr(exllamav2, "Prompter", SimpleNamespace(load=lambda _: cpu.Prompter(stop_ids)))
        spec = ModelSpec(model=str(model or folder), engine="exllamav2", context_len=context_len, **fields)
        loading, progress = exllamav2.load(spec), []
        try:
            while True:
                progress.append(next(loading))
        except StopIteration as end:
            engine = end.value
        engine.progress = progress
        opened.append(engine)
        return engine

    yield open_it
    for engine in opened:
        engine.close()
