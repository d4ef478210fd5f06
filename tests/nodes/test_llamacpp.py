"""A GGUF file in the real ComfyUI: `auto` takes llama.cpp, which leaves when asked to and cannot harm the server."""

import json
import os
import signal
import threading

import pytest

from tests.nodes.conftest import free, generate, load_llm, prompt_node
from tests.processes import children, frozen_in_load, is_gone, wait_for_child

pytestmark = pytest.mark.server
pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed")


@pytest.fixture
def comfy(comfy_with, gguf_path):
    return comfy_with(models=[gguf_path])


def graph(gguf, text="Say hello.", **fields):
    show = {"class_type": "PreviewAny", "inputs": {"source": ["3", 2]}}
    prompt = {"1": load_llm(gguf.name, engine="auto", context_len=512), "2": prompt_node(text)}
    return prompt | {"3": generate(**{"max_tokens": 4, **fields}), "4": show}


def unloaded(comfy):
    return comfy.run_prompt({"1": free(), "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}}})


def test_a_gguf_is_run_by_llamacpp_and_freed_by_the_node_for_it(comfy, gguf_path):
    run = comfy.run_prompt(graph(gguf_path))
    [pid] = children(comfy.process.pid)
    freed = unloaded(comfy)

    assert run.status == "success", run.error
    report = json.loads(run.outputs["4"]["text"][0])
    assert (report["engine"], report["num_output_tokens"]) == ("llamacpp", 4)
    assert freed.status == "success", freed.error
    assert "1 unloaded" in json.dumps(freed.outputs)
    assert is_gone(pid)


def test_while_a_gguf_loads_the_server_answers_and_an_interrupt_ends_the_load(comfy, gguf_path):
    """The load is frozen, as that of a file of 16 GB on a slow disk would seem to be."""
    unloaded(comfy)
    told = []

    with frozen_in_load(comfy.process.pid) as frozen:

        def interrupt():
            frozen()
            told.append(comfy.get("/system_stats"))
            comfy.interrupt()

        threading.Thread(target=interrupt, daemon=True).start()
        run = comfy.run_prompt(graph(gguf_path, "Interrupted."), timeout_s=120)

    assert run.status == "interrupted"
    assert told[0]["system"]
    assert is_gone(frozen())
    again = comfy.run_prompt(graph(gguf_path, "Interrupted."))
    assert again.status == "success", again.error


def test_a_llamacpp_that_dies_is_an_error_of_the_node_and_the_server_lives(comfy, gguf_path):
    killed = []

    def on_event(event):
        if event.type == "resident.stream" and event.data["delta"] and not killed:
            killed.append(wait_for_child(comfy.process.pid))
            os.kill(killed[0], signal.SIGSEGV)

    run = comfy.run_prompt(graph(gguf_path, "Tell a long story.", max_tokens=400), on_event=on_event)

    assert run.status == "error"
    assert "llama.cpp ended while it wrote: its process ended with signal SIGSEGV" in run.error["exception_message"]
    again = comfy.run_prompt(graph(gguf_path, "Are you there?"))
    assert again.status == "success", again.error
    [pid] = children(comfy.process.pid)
    assert pid not in killed


def test_no_llamacpp_outlives_a_server_that_is_killed(comfy, gguf_path):
    run = comfy.run_prompt(graph(gguf_path, "The last words."))
    [pid] = children(comfy.process.pid)

    comfy.process.kill()

    assert run.status == "success", run.error
    assert is_gone(pid)
