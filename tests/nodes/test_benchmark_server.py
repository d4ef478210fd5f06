"""The benchmark of a real model: through the node in the real server, and through the command."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes.conftest import load_llm
from tests.nodes.stub_host import ROOT
from tools.model import GGUF, NAME

pytestmark = pytest.mark.server

SIZE = {"contexts": "64", "output_tokens": 8, "repeats": 1, "warmup": 1, "batch_sizes": "1", "kv_caches": "auto"}
CLI_SIZE = ["--contexts", "64", "--output-tokens", "8", "--repeats", "1", "--warmup", "0"]


@pytest.fixture
def comfy(comfy_with, model_path, gguf_path):
    return comfy_with(models=[model_path, gguf_path])


def measured_by_node(comfy, model, engine, **inputs):
    """All that the node tells of one model; a new seed in the model's options would be needed to run it again."""
    options = {"check": True, "with_stage": True, **SIZE, **inputs}
    context_len = 256 * random.SystemRandom().randrange(2, 8)  # another one is another input, so that it runs
    prompt = {
        "1": load_llm(model, engine=engine, context_len=context_len),
        "2": {"class_type": "ResidentBenchmark", "inputs": {"llm": ["1", 0], **options}},
        "3": {"class_type": "PreviewAny", "inputs": {"source": ["2", 2]}},
        "4": {"class_type": "SaveImage", "inputs": {"images": ["2", 1], "filename_prefix": "bench"}},
    }
    run = comfy.run_prompt(prompt, timeout_s=300)
    assert run.status == "success", run.error
    return run, json.loads(run.outputs["3"]["text"][0])


def measured_by_command(tmp_path, *models):
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "runtime", "bench", *map(str, models), *CLI_SIZE, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def believable(row):
    """What any row of a run with 64 prompt tokens and 8 output tokens must hold."""
    assert row["errors"] == []
    assert (row["num_prompt_tokens"], row["output_tokens"], row["repeats"]) == (64, 8, 1)
    assert row["ttft_warm_s"] > 0
    assert row["ttft_cold_s"] < row["latency_p50_s"]
    assert row["throughput_tokens_per_s"] < row["decode_tokens_per_s"]
    assert row["decode_tokens_per_s"] == pytest.approx(1 / row["tpot_p50_s"])
    assert row["bandwidth_bytes_per_s"] > 1e8
    assert row["ceiling_tokens_per_s"] == pytest.approx(row["bandwidth_bytes_per_s"] / row["step_bytes"])
    assert row["num_cached_tokens"] >= 60


def test_the_node_and_the_command_give_the_same_rows_of_a_transformers_model(comfy, model_path, tmp_path):
    pytest.importorskip("transformers")

    run, told = measured_by_node(comfy, NAME, "transformers")
    printed, file = measured_by_command(tmp_path, model_path, "--engine", "transformers", "--check")

    [by_node], [by_command] = told["rows"], file["rows"]
    assert by_node.keys() == by_command.keys()
    for row in (by_node, by_command):
        believable(row)
        assert row["checks"]["greedy equals a manual loop"] == "passed"
        assert row["checks"]["KV bytes as computed"] == "passed"
        assert row["checks"]["nothing offloaded"] == "passed"
        assert row["checks"]["fast attention kernel launched"].startswith("not checked: ")
        assert row["step_bytes"] > 538e6  # 134.5 million parameters in fp32, and the cache
    assert {"cold_s", "resident_s", "engine_s", "overhead_s", "evict_s", "returned_s", "node_s"} <= told["stage"].keys()
    assert told["stage"]["evicted_bytes"] > 500e6
    assert told["environment"]["packages"]["torch"] == file["environment"]["packages"]["torch"]
    assert NAME in printed and NAME in run.outputs["2"]["text"][0]
    [path] = run.outputs["2"]["file"]
    assert path.startswith(str(comfy.base / "output"))
    assert json.loads(Path(path).read_text()) == told


def test_llamacpp_writes_exactly_as_many_tokens_in_both(comfy, gguf_path, tmp_path):
    pytest.importorskip("xllamacpp")

    _, told = measured_by_node(comfy, GGUF, "llamacpp", with_stage=False)
    _, file = measured_by_command(tmp_path, gguf_path, "--engine", "llamacpp")

    [by_node], [by_command] = told["rows"], file["rows"]
    assert by_node.keys() == by_command.keys()
    for row in (by_node, by_command):
        believable(row)
        assert row["step_bytes"] == pytest.approx(gguf_path.stat().st_size, rel=0.1)


def benchmark(**inputs):
    """The API form of an LLM Benchmark node on the model of node 1; another seed of sizes makes it run again."""
    defaults = {**SIZE, "warmup": random.SystemRandom().randrange(2, 9), "check": False, "with_stage": False}
    return {"class_type": "ResidentBenchmark", "inputs": {"llm": ["1", 0], **defaults, **inputs}}


def test_two_loaders_are_measured_side_by_side(scripted):
    loaders = {"1": load_llm("script-markup"), "4": load_llm("script-long")}

    run = scripted.run_prompt({**loaders, "2": benchmark(llm_2=["4", 0])})

    assert run.status == "success", run.error
    [file] = run.outputs["2"]["file"]
    rows = json.loads(Path(file).read_text())["rows"]
    assert [(Path(row["model"]).name, row["errors"]) for row in rows] == [("script-markup", []), ("script-long", [])]


def test_an_interrupt_keeps_the_rows_that_were_done(scripted):
    folder = scripted.base / "output" / "resident_llm_bench"
    before = set(folder.glob("*.json"))

    def stop_in_the_second_row(event):
        new = set(folder.glob("*.json")) - before
        if new and event.type == "progress":
            scripted.interrupt()

    prompt = {"1": load_llm("script-long"), "2": benchmark(contexts="64, 128, 256", repeats=3, output_tokens=64)}
    run = scripted.run_prompt(prompt, on_event=stop_in_the_second_row)

    [file] = set(folder.glob("*.json")) - before
    rows = json.loads(file.read_text())["rows"]
    assert run.status == "interrupted"
    assert 1 <= len(rows) < 3
    assert rows[0]["errors"] == []
