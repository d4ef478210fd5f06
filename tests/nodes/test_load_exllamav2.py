import inspect
import re

import pytest

from runtime.engines import exllamav2_install
from tests.imports import ROOT
from tests.nodes.conftest import graph


@pytest.fixture
def node(pack, monkeypatch, tmp_path):
    """The node's module with three models to choose from, on a machine that can run the engine."""
    module = pack("nodes.load_exllamav2")
    for name in ("big", "small", "lora"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "one.gguf").write_bytes(b"x")
    monkeypatch.setattr(pack("nodes.host"), "llm_folders", lambda: [str(tmp_path)])
    monkeypatch.setattr(module, "why_unavailable", lambda: None)
    return module


def load(node, **inputs):
    """The spec that the node hands out."""
    defaults = {
        "model": "big",
        "context_len": 8192,
        "kv_cache": "fp16",
        "draft": node.NO_DRAFT,
        "num_draft_tokens": 4,
        "attention": "auto",
        "max_batch": 8,
        "loras": "",
        "when_idle": "keep",
    }
    seen = []
    node.io.NodeOutput = seen.append
    node.LoadExLlamaV2.execute(**{**defaults, **inputs})
    return seen[0]


def test_it_hands_out_a_spec_for_its_engine(node, tmp_path):
    spec = load(node, kv_cache="q6", context_len=0)

    assert (spec.engine, spec.kv_cache, spec.context_len) == ("exllamav2", "q6", None)
    assert spec.model == str(tmp_path / "big")
    assert spec.option("draft") is None


def test_drafting_is_by_n_grams_or_by_a_model_of_the_menu(node, tmp_path):
    assert load(node, draft=node.NGRAM).option("draft") == "ngram"
    assert load(node, draft="small", num_draft_tokens=6).options == (
        ("draft", str(tmp_path / "small")),
        ("max_batch", 8),
        ("num_draft_tokens", 6),
    )


def test_a_draft_model_whose_files_changed_makes_another_recipe(node, tmp_path):
    before = load(node, draft="small")
    mark = node.LoadExLlamaV2.fingerprint_inputs(model="big", draft="small")

    (tmp_path / "small" / "config.json").write_text("{}")

    assert load(node, draft="small") != before
    assert node.LoadExLlamaV2.fingerprint_inputs(model="big", draft="small") != mark
    assert load(node, draft=node.NGRAM).revision == before.revision.partition("-")[0]


def test_loras_are_names_of_the_menu_with_a_strength(node, tmp_path, pack):
    spec = load(node, loras="lora @ 0.8\n\nsmall\n")

    assert spec.option("loras") == f"{tmp_path}/lora @ 0.8\n{tmp_path}/small"
    with pytest.raises(pack("runtime.errors").ModelNotFound):
        load(node, loras="../../etc @ 1")


def test_a_machine_that_cannot_run_it_says_so_on_the_node(node, monkeypatch, pack):
    monkeypatch.setattr(node, "why_unavailable", lambda: "torch 2.13.0+cpu is a CPU build")

    with pytest.raises(pack("runtime.errors").EngineUnavailable, match=r"ExLlamaV2 cannot run here: torch 2\.13\.0"):
        load(node)


def test_a_model_that_is_gone_is_told_before_the_graph_runs(node):
    validate = node.LoadExLlamaV2.validate_inputs

    assert validate("big", node.NGRAM) is True
    assert validate(None, None) is True
    assert "'gone' is not in" in validate("gone", node.NO_DRAFT)
    assert "'gone' is not in" in validate("big", "gone")


def test_the_help_page_tells_every_input(node):
    page = (ROOT / "web" / "docs" / "ResidentLoadExLlamaV2.md").read_text(encoding="utf-8")

    told = set(re.findall(r"^- \*\*(\w+)\*\*", page.partition("## Inputs")[2], flags=re.MULTILINE))
    assert told == set(inspect.signature(node.LoadExLlamaV2.execute).parameters)


@pytest.mark.server
@pytest.mark.skipif(exllamav2_install.why_unavailable() is None, reason="ExLlamaV2 can run here")
def test_in_a_graph_the_node_says_why_it_cannot_run_here(scripted):
    inputs = scripted.get("/object_info/ResidentLoadExLlamaV2")["ResidentLoadExLlamaV2"]["input"]["required"]
    defaults = {name: options["default"] for name, (_, options) in inputs.items() if "default" in options}
    loader = {"class_type": "ResidentLoadExLlamaV2", "inputs": {"model": "script-quick", **defaults}}

    run = scripted.run_prompt({**graph(), "1": loader})

    assert run.status == "error"
    assert run.error["node_type"] == "ResidentLoadExLlamaV2"
    assert run.error["exception_message"].startswith("ExLlamaV2 cannot run here: ")
