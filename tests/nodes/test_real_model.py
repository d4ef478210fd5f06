"""Generate Text with a real model in the real ComfyUI."""

import itertools
import json
import os
import random
import shutil

import pytest

from tests.nodes.conftest import free, generate, interrupted, load_llm, prompt_node

pytestmark = pytest.mark.server

SHORT = "Name a colour."
num_runs = itertools.count(1)


def graph(model, user=SHORT, **inputs):
    """A short answer. The budget has no effect on this model; it only keeps the host's cache from answering."""
    values = {"max_tokens": 8, "thinking_budget": next(num_runs), **inputs}
    return {
        "1": load_llm(model, engine="transformers", context_len=1024),
        "2": prompt_node(user),
        "3": generate(**values),
    }


def long_text(chance):
    return " ".join(f"word{chance.randrange(1000)}" for _ in range(160))


def test_streamed_text_equals_the_final_text_and_the_report_tells(comfy, model_path):
    run = comfy.run_prompt(graph(model_path.name, max_tokens=12))

    assert run.status == "success", run.error
    [text], [report] = run.outputs["3"]["text"], [json.loads(one) for one in run.outputs["3"]["report"]]
    assert run.streamed("3") == text != ""
    assert report["engine"] == "transformers" and report["finish"]["reason"] in ("stop", "length")
    assert 0 < report["num_output_tokens"] <= 12 < report["num_prompt_tokens"]
    assert report["ttft_s"] > 0 and report["bytes"]["weights"] > 0


@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_an_interrupt_at_any_moment_leaves_the_next_run_as_it_was(comfy, model_path, phase):
    """Fifteen interrupts at random moments of the phase, each followed by a run equal to the undisturbed one."""
    name, chance = model_path.name, random.Random(phase)
    undisturbed = comfy.run_prompt(graph(name)).outputs["3"]["text"]
    num_hits, num_tries = 0, 0

    while num_hits < 15:
        num_tries += 1
        assert num_tries < 60, f"only {num_hits} of {num_tries} interrupts came in time"
        if phase == "load":
            comfy.run_prompt({"1": free()})
        text, num_tokens = (long_text(chance), 8) if phase == "prefill" else (SHORT, 200)
        run = interrupted(comfy, graph(name, text, max_tokens=num_tokens), phase, chance.uniform(0, 0.5))
        if run.status == "interrupted" and run.of_type("resident.stream")[-1]["phase"] == phase:
            num_hits += 1
            assert comfy.run_prompt(graph(name)).outputs["3"]["text"] == undisturbed


def damaged(model_path, folder):
    """Copies of the model, each with one thing wrong; what to expect in the sentence."""
    link = {"copy_function": os.link}

    def copy(name, *left_out):
        shutil.copytree(model_path, folder / name, ignore=shutil.ignore_patterns(*left_out), **link)
        return folder / name

    copy("no-tokenizer", "tokenizer*", "vocab*", "merges*")
    truncated = copy("truncated", "*.safetensors") / "model.safetensors"
    with open(next(model_path.glob("*.safetensors")), "rb") as whole:
        truncated.write_bytes(whole.read(1_000_000))
    wrong = copy("wrong-config", "config.json")
    config = json.loads((model_path / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "hidden_size": config["hidden_size"] * 2}))
    (folder / "no-weights").mkdir()
    shutil.copy(model_path / "config.json", folder / "no-weights" / "config.json")


@pytest.fixture(scope="module")
def damaged_models(model_path, comfy_with):
    comfy = comfy_with()
    folder = comfy.base / "models" / "LLM" / "damaged"
    folder.mkdir()
    damaged(model_path, folder)
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("truncated", "safetensors"),
        ("no-tokenizer", "tokenizer"),
        ("wrong-config", "config"),
        ("no-weights", "safetensors"),
    ],
)
def test_a_damaged_model_is_one_sentence_on_the_node_and_the_server_lives(comfy, damaged_models, name, word):
    run = comfy.run_prompt(graph(f"damaged/{name}"))

    assert run.status == "error"
    sentence = run.error["exception_message"].strip()
    assert word in sentence
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 600
    assert run.error["exception_type"].rpartition(".")[2] in ("ModelLoadFailed", "ModelUnsupported", "ModelNotFound")
    assert comfy.get("/queue")["queue_running"] == []


def test_an_empty_folder_is_refused_with_a_sentence(comfy, damaged_models):
    run = comfy.run_prompt(graph("damaged/empty"))

    assert run.status == "rejected"
    assert "'damaged/empty' holds no model" in run.error["node_errors"]["1"]["errors"][0]["details"]
