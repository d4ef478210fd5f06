"""The server engine against a real llama.cpp of its own: one server for all tests, killed in the last ones."""

import json
import os
import signal
import threading

import pytest

from runtime import GREEDY, ModelSpec, Prompt, Request, profiles
from runtime.errors import ServerError
from runtime.profiles import Profile
from runtime.prompting.prompter import Prompter
from tests.nodes.conftest import generate
from tests.nodes.stub_host import ROOT
from tests.servers import every_server
from tests.servers.asking import ask, begin, drain, results
from tests.servers.llamacpp import LlamaCpp
from tools.comfyui import PACK_NAME

pytestmark = pytest.mark.server

QUESTION = every_server.QUESTION


@pytest.fixture
def server(llamacpp_server):
    return llamacpp_server


globals().update(every_server.PROMISES)


def test_a_gguf_file_is_as_good_a_tokenizer_as_a_folder(spec, runtime, gguf_path):
    by_folder = results(runtime, spec(), ask(QUESTION))[0]
    runtime.unload()
    by_file = results(runtime, spec(tokenizer=str(gguf_path)), ask(QUESTION))[0]

    assert by_file.report["num_prompt_tokens"] == by_folder.report["num_prompt_tokens"]
    assert by_file.text == by_folder.text


def test_more_requests_than_it_has_slots_wait_in_it_and_are_all_answered(spec, runtime, server):
    requests = [ask(f"Say {n}.", max_tokens=2) for n in range(16)]

    found = results(runtime, spec(max_concurrent=16), *requests)

    assert [one.report["num_output_tokens"] for one in found] == [2] * 16
    assert server.is_idle()


THINKING = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
"""A template that opens the thinking block, as those of thinking models do."""


@pytest.mark.parametrize(("thinking", "has_thought"), [("auto", True), ("on", True), ("off", False)])
def test_what_the_server_calls_reasoning_is_thinking_and_no_text(
    gguf_path, profile_file, runtime, tmp_path, thinking, has_thought
):
    thinker = LlamaCpp(gguf_path, tmp_path / "log.txt", THINKING)
    thinker.start()
    try:
        profiles.write(Profile(name="box", base_url=thinker.url, key=thinker.key))
        the_spec = ModelSpec(model="box/smollm2", engine="openai")
        prompt = Prompt(messages=Prompt.of(QUESTION).messages, thinking=thinking)
        request = Request(prompt=prompt, sampling=GREEDY, max_tokens=6, on_cut_thinking="empty")

        [result] = results(runtime, the_spec, request)
    finally:
        thinker.stop()

    assert bool(result.thinking_text.strip()) == has_thought
    assert bool(result.text.strip()) != has_thought
    assert result.report["num_output_tokens"] == 6


@pytest.fixture(scope="module")
def box_file(llamacpp_server, model_path, tmp_path_factory):
    """Profiles for ComfyUI: the same server, by ids and by its chat endpoint."""
    path = tmp_path_factory.mktemp("profiles") / "profiles.json"
    for name, fields in (("by-ids", {"tokenizer": str(model_path)}), ("by-chat", {"uses_chat": True})):
        profiles.write(Profile(name=name, base_url=llamacpp_server.url, key=llamacpp_server.key, **fields), path)
    return path


@pytest.fixture
def comfy(comfy_with, box_file, server):
    server.start_if_down()
    packs = {PACK_NAME: ROOT, "list-pack": ROOT / "tests" / "nodes" / "list_pack"}
    return comfy_with(models=[], packs=packs, env={profiles.PATH_VARIABLE: str(box_file)})


def list_graph(profile, texts, **fields):
    """A ComfyUI list of prompts into Generate Text."""
    connect = {"profile": profile, "model": "(what the server serves)", "other_model": "", "when_idle": "keep"}
    return {
        "1": {"class_type": "ResidentConnectServer", "inputs": connect},
        "2": {"class_type": "TestPromptList", "inputs": {"texts": "\n".join(texts)}},
        "3": generate(**fields),
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}},
    }


@pytest.mark.parametrize(("profile", "endpoint"), [("by-ids", "native"), ("by-chat", "chat")])
def test_a_list_of_8_through_the_node_keeps_its_order(comfy, server, model_path, profile, endpoint):
    texts = [f"Go on counting: {'1 ' * (n + 1)}" for n in (5, 2, 7, 0, 3, 6, 1, 4)]
    prompter = Prompter.load(str(model_path))

    run = comfy.run_prompt(list_graph(profile, texts, max_tokens=6))

    assert run.status == "success", run.error
    reports = [json.loads(one) for one in run.outputs["3"]["report"]]
    assert [one["num_prompt_tokens"] for one in reports] == [
        prompter.encode(Prompt.of(text)).num_tokens for text in texts
    ]
    assert {one["endpoint"] for one in reports} == {endpoint}
    assert run.outputs["3"]["text"] == [run.streamed("3", at) for at in range(8)]
    assert all(run.outputs["3"]["text"])
    assert server.is_idle()


@pytest.mark.parametrize("profile", ["by-ids", "by-chat"])
def test_an_item_that_is_too_long_fails_alone_and_is_named(comfy, server, profile):
    texts = [f"Say {n}." for n in range(8)]
    texts[2] = "word " * 2000

    run = comfy.run_prompt(list_graph(profile, texts, max_tokens=6))

    assert run.status == "error"
    message = run.error["exception_message"]
    assert message.startswith("Item 3 of 8 failed: ") and "(7 of 8 items finished.)" in message
    assert str(server.context_len) in message
    assert [bool(run.streamed("3", at)) for at in range(8)] == [at != 2 for at in range(8)]
    assert "4" not in run.ran()


def test_an_interrupt_in_the_middle_of_a_list_leaves_the_server_idle(comfy, server):
    graph = list_graph("by-ids", [f"Tell a very long story of {n} bears." for n in range(8)], max_tokens=800)
    begun = threading.Event()

    def on_event(event):
        if event.type == "resident.stream" and event.data["delta"] and not begun.is_set():
            begun.set()
            comfy.interrupt()

    run = comfy.run_prompt(graph, on_event=on_event)

    assert run.status == "interrupted"
    assert server.is_idle()
    again = comfy.run_prompt(list_graph("by-ids", ["Say hello."], max_tokens=4))
    assert again.status == "success", again.error


ENDS = {
    "frozen": (signal.SIGSTOP, "no further token within 2 s"),
    "terminated": (signal.SIGTERM, "broke"),
    "killed": (signal.SIGKILL, "broke"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_server_that_is_lost_in_mid_stream_never_gives_a_part_as_whole(spec, runtime, server, how):
    signum, sentence = ENDS[how]
    server.start_if_down()
    wanted = results(runtime, spec(), ask(QUESTION))[0].text
    runtime.unload()
    events = begin(runtime, spec(between_tokens_s=2.0), max_tokens=900)

    os.killpg(server.pid, signum)
    with pytest.raises(ServerError, match=sentence):
        drain(events)

    if how == "frozen":
        os.killpg(server.pid, signal.SIGCONT)
        assert server.is_idle()
    else:
        server.stop()
        with pytest.raises(ServerError, match="cannot be reached"):
            results(runtime, spec(), ask("x"))
        server.start()
    assert results(runtime, spec(), ask(QUESTION))[0].text == wanted


def test_a_server_that_freezes_before_the_first_token_is_told(spec, runtime, server):
    server.start_if_down()
    the_spec = spec(first_token_s=2.0)
    results(runtime, the_spec, ask(QUESTION, max_tokens=1))
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerError, match="no first token within 2 s"):
            results(runtime, the_spec, ask(QUESTION))
    finally:
        os.killpg(server.pid, signal.SIGCONT)
    assert server.is_idle()
