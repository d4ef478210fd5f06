"""The nodes in the real ComfyUI, with scripted models."""

import json
import random
import re
import uuid

import pytest

from tests.host.comfy import EventSocket
from tests.nodes.conftest import REPLY, free, generate, graph, interrupted, load_llm
from tests.nodes.stub_host import ROOT

pytestmark = pytest.mark.server

ANSWER = REPLY.replace("{prompt}", "a cat")


@pytest.fixture
def info(scripted):
    found = scripted.get("/object_info")
    return {name: node for name, node in found.items() if name.startswith("Resident")}


def num_loads(comfy, model):
    log = comfy.log_path.read_text(errors="replace")
    return len(re.findall(rf"\bloaded \S*/{model}: ", log))


def fresh_seed():
    """A seed that no test before has used, so that nothing comes from the host's cache."""
    return random.SystemRandom().randrange(2**40)


def test_every_node_is_there_and_every_input_and_output_is_explained(info, pack):
    assert len(info) == len(pack("nodes").NODES)  # this host leaves out a node whose output has an input's id
    for name, node in info.items():
        inputs = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
        unexplained = [key for key, (_, options) in inputs.items() if not options.get("tooltip")]
        assert not unexplained, name
        assert node["description"] and node["display_name"] and node["category"].startswith("Resident LLM")
        assert all(node["output_tooltips"]), name


def test_every_node_has_a_help_page(info):
    missing = [name for name in info if not (ROOT / "web" / "docs" / f"{name}.md").is_file()]

    assert not missing


def test_what_is_typed_is_what_the_model_reads(info):
    for node in info.values():
        for kind, options in {**node["input"].get("required", {}), **node["input"].get("optional", {})}.values():
            if kind == "STRING" and options.get("multiline"):
                assert options["dynamicPrompts"] is False


def test_the_pack_imports_quickly_by_the_hosts_own_list(scripted):
    [seconds] = re.findall(r"([\d.]+) seconds: .*custom_nodes/resident-llm\n", scripted.log_path.read_text())

    assert float(seconds) < 2


def test_streamed_text_equals_the_final_text(scripted):
    run = scripted.run_prompt(graph("script-slow", seed=fresh_seed()))

    assert run.outputs["3"]["text"] == [ANSWER * 2]
    assert run.streamed("3") == ANSWER * 2
    assert len([m for m in run.of_type("resident.stream") if m["delta"]]) > 5


def test_thinking_is_streamed_and_given_apart(scripted):
    run = scripted.run_prompt(graph("script-thinks", seed=fresh_seed()))

    assert (run.streamed("3"), run.streamed("3", channel="thinking")) == (ANSWER, "A cat, then.")
    assert (run.outputs["3"]["text"], run.outputs["3"]["thinking_text"]) == ([ANSWER], ["A cat, then."])


def test_two_generators_share_one_load(scripted):
    before = num_loads(scripted, "script-thinks")
    prompt = {
        **graph("script-thinks", seed=fresh_seed()),
        "4": generate(seed=fresh_seed()),
        "5": load_llm("script-thinks"),
    }
    prompt["6"] = generate(llm="5", seed=fresh_seed())

    run = scripted.run_prompt(prompt)

    assert [run.outputs[node]["text"] for node in "346"] == [[ANSWER]] * 3
    assert num_loads(scripted, "script-thinks") - before <= 1
    assert num_loads(scripted, "script-thinks") >= 1


def test_queued_twice_unchanged_nothing_runs(scripted):
    prompt = graph(seed=fresh_seed())
    first = scripted.run_prompt(prompt)

    second = scripted.run_prompt(prompt)

    assert second.ran() == []
    assert second.of_type("resident.stream") == []
    assert second.outputs == first.outputs


def test_a_changed_file_is_another_model(scripted):
    config = scripted.base / "models" / "LLM" / "script-edited" / "config.json"
    config.parent.mkdir()
    prompt = graph("script-edited", seed=1)

    config.write_text(json.dumps({"reply": "old"}))
    old = scripted.run_prompt(prompt)
    config.write_text(json.dumps({"reply": "newer"}))
    new = scripted.run_prompt(prompt)

    assert (old.outputs["3"]["text"], new.outputs["3"]["text"]) == (["old"], ["newer"])


def test_a_prompt_without_client_id_gives_the_same_and_sends_nothing(scripted):
    prompt = graph(seed=fresh_seed())

    run = scripted.run_prompt(prompt, client_id=None)

    assert run.status == "success"
    assert run.outputs["3"]["text"] == [ANSWER]
    assert run.of_type("resident.stream") == []
    assert run.of_type("progress_text") == []


def test_live_text_reaches_the_owner_only(scripted):
    with EventSocket(scripted.url, uuid.uuid4().hex) as stranger:
        run = scripted.run_prompt(graph("script-slow", seed=fresh_seed()))
        overheard = []
        while event := stranger.receive(0.5):
            overheard.append(event.type)

    assert run.of_type("resident.stream")
    assert "resident.stream" not in overheard


def test_a_list_of_prompts_with_one_seed_is_one_batch_in_order(scripted):
    prompt = {"1": load_llm(), "l": {"class_type": "TestPromptList", "inputs": {"texts": "a cat\na dog\na fox"}}}
    prompt["3"] = generate(prompt="l", seed=fresh_seed() + 5)

    run = scripted.run_prompt(prompt)

    seed = prompt["3"]["inputs"]["seed"]
    assert run.outputs["3"]["text"] == [REPLY.replace("{prompt}", one) for one in ("a cat", "a dog", "a fox")]
    assert [json.loads(one)["seed"] for one in run.outputs["3"]["report"]] == [seed, seed + 1, seed + 2]
    assert [run.streamed("3", i) for i in range(3)] == run.outputs["3"]["text"]


def test_one_failing_item_lets_the_others_finish_and_is_named(scripted):
    prompt = {
        "1": load_llm("script-picky"),
        "l": {"class_type": "TestPromptList", "inputs": {"texts": "a\nforbidden\nc"}},
    }
    prompt["3"] = generate(prompt="l", seed=fresh_seed())
    prompt["4"] = {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}}

    run = scripted.run_prompt(prompt)

    assert run.status == "error"
    assert run.error["exception_message"].startswith("Item 2 of 3 failed: step 1 failed by script.")
    assert "(2 of 3 items finished.)" in run.error["exception_message"]
    assert [run.streamed("3", i) for i in (0, 2)] == [REPLY.replace("{prompt}", one) for one in "ac"]
    assert "4" not in run.ran()
    assert scripted.run_prompt(graph(seed=fresh_seed())).status == "success"


def test_a_text_can_be_wired_in_instead_of_a_prompt(scripted):
    prompt = {"1": load_llm(), "3": generate(prompt="5", seed=fresh_seed())}
    prompt["5"] = {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "a cat"}}

    run = scripted.run_prompt(prompt)

    assert run.outputs["3"]["text"] == [ANSWER]


def test_the_outputs_are_texts_for_other_nodes(scripted):
    prompt = {**graph(seed=fresh_seed()), "4": {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}}}

    run = scripted.run_prompt(prompt)

    assert run.outputs["4"]["text"] == [ANSWER]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [("gone", "'gone' is not in"), ("../secret", "'../secret' is not in"), ("/etc", "'/etc' is not in")],
)
def test_a_model_that_is_not_in_the_menu_is_refused_with_a_sentence(scripted, model, sentence):
    run = scripted.run_prompt(graph(model))

    assert run.status == "rejected"
    [error] = run.error["node_errors"]["1"]["errors"]
    assert sentence in error["details"] and "There are: script-" in error["details"]


def test_an_empty_prompt_is_one_sentence_on_the_node(scripted):
    run = scripted.run_prompt(graph(user=" ", seed=fresh_seed()))

    assert run.error["exception_message"].strip() == (
        "The prompt holds no user text. Write something into `user`, or wire a text in."
    )


def test_free_unloads_and_the_next_run_loads_again(scripted):
    scripted.run_prompt(graph("script-thinks", seed=fresh_seed()))
    before = num_loads(scripted, "script-thinks")

    freed = scripted.run_prompt({"1": free()})
    run = scripted.run_prompt(graph("script-thinks", seed=fresh_seed()))

    assert "unloaded" in freed.outputs["1"]["text"][0]
    assert run.outputs["3"]["text"] == [ANSWER]
    assert num_loads(scripted, "script-thinks") == before + 1


def test_free_passes_its_value_on(scripted):
    prompt = {**graph(seed=fresh_seed()), "4": free(value=["3", 0])}
    prompt["5"] = {"class_type": "PreviewAny", "inputs": {"source": ["4", 0]}}

    run = scripted.run_prompt(prompt)

    assert run.outputs["5"]["text"] == [ANSWER]


PHASES = ("load", "prefill", "decode")


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_in_any_phase_leaves_the_next_run_as_it_was(scripted, phase):
    """Fifteen interrupts at random moments of the phase, each followed by the run that was never interrupted."""
    chance = random.Random(phase)
    num_hits = 0
    while num_hits < 15:
        if phase == "load":
            scripted.run_prompt({"1": free()})
        run = interrupted(scripted, graph("script-slow", seed=fresh_seed()), phase, chance.uniform(0, 0.5))
        if run.status != "interrupted" or run.of_type("resident.stream")[-1]["phase"] != phase:
            continue
        num_hits += 1
        again = scripted.run_prompt(graph("script-quick", seed=fresh_seed()))
        assert again.outputs["3"]["text"] == [ANSWER]
    whole = scripted.run_prompt(graph("script-slow", seed=fresh_seed()))
    assert whole.outputs["3"]["text"] == [ANSWER * 2]
