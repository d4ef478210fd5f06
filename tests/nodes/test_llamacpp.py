"""A GGUF file in the real ComfyUI: `auto` takes llama.cpp, and the model leaves when it is asked to."""

import json

import pytest

from tests.nodes.conftest import free, generate, load_llm, prompt_node

pytestmark = pytest.mark.server
pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed")


def test_a_gguf_is_run_by_llamacpp_and_freed_by_the_node_for_it(comfy_with, gguf_path):
    comfy = comfy_with(models=[gguf_path])
    show = {"class_type": "PreviewAny", "inputs": {"source": ["3", 2]}}
    prompt = {"1": load_llm(gguf_path.name, engine="auto", context_len=256), "2": prompt_node("Say hello.")}
    prompt |= {"3": generate(max_tokens=4), "4": show}

    run = comfy.run_prompt(prompt)
    freed = comfy.run_prompt({"1": free(), "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}})

    assert run.status == "success", run.error
    report = json.loads(run.outputs["4"]["text"][0])
    assert (report["engine"], report["num_output_tokens"]) == ("llamacpp", 4)
    assert freed.status == "success", freed.error
    assert "1 unloaded" in json.dumps(freed.outputs)
