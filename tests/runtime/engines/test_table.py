import json
import struct

import pytest

from runtime import ModelSpec, engines
from runtime.engines import EngineRow, choose
from runtime.errors import EngineUnavailable, ModelNotFound, ModelUnsupported
from tests.imports import ROOT


def a_row(name, **fields):
    defaults = {"formats": ("safetensors",), "why_unavailable": lambda: None, "install": ""}
    return EngineRow(name=name, title=name, module=name, **{**defaults, **fields})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4}))
    header = json.dumps({"w": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return str(tmp_path)


def test_auto_is_the_first_engine_that_can_run_the_model(folder, monkeypatch):
    rows = (
        a_row("gguf-only", formats=("gguf",)),
        a_row("missing", why_unavailable=lambda: "not here"),
        a_row("picky", why_unsupported=lambda info: f"not {info.model_type}"),
        a_row("right"),
        a_row("later"),
    )
    monkeypatch.setattr(engines, "ENGINES", rows)

    assert choose(ModelSpec(model=folder)).name == "right"


def test_auto_without_an_engine_names_each_ones_reason(folder, monkeypatch):
    rows = (a_row("one", formats=("gguf",)), a_row("two", why_unavailable=lambda: "torch is not installed"))
    monkeypatch.setattr(engines, "ENGINES", rows)

    with pytest.raises(ModelUnsupported, match="one: it reads gguf, and this is safetensors; two: torch is not inst"):
        choose(ModelSpec(model=folder))


def test_auto_for_a_model_that_is_not_there_says_so(tmp_path):
    with pytest.raises(ModelNotFound):
        choose(ModelSpec(model=str(tmp_path / "gone")))


def test_a_named_engine_is_taken_at_its_word():
    assert choose(ModelSpec(model="anything", engine="scripted")).name == "scripted"


def test_an_unknown_engine_is_answered_with_those_there_are():
    names = ", ".join(row.name for row in engines.ENGINES)

    with pytest.raises(EngineUnavailable, match=f"There is no engine 'exl9'. Engines are: {names}."):
        choose(ModelSpec(model="x", engine="exl9"))


@pytest.mark.parametrize("row", engines.ENGINES, ids=lambda row: row.name)
def test_every_row_has_its_module_and_says_what_would_bring_it(row):
    base = ROOT / "runtime" / "engines" / row.module

    assert base.with_suffix(".py").exists() or (base / "__init__.py").exists()
    assert row.install or row.name == "scripted"
