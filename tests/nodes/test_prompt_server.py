"""LLM Prompt on a real ComfyUI server: with the real model, and with scripted ones."""

import json
import re
from pathlib import Path

import pytest

from runtime import Prompt
from runtime.prompting import presets
from runtime.prompting.prompter import Prompter
from tests.nodes.conftest import generate, load_llm

pytestmark = pytest.mark.server


def load(model="script-quick", **inputs):
    return load_llm(model, **{"host_copy_gb": -1.0, **inputs})


def prompt_node(user="a cat", system="", **inputs):
    return {"class_type": "ResidentPrompt", "inputs": {"system": system, "user": user, **inputs}}


def show(node, slot):
    return {"class_type": "PreviewAny", "inputs": {"source": [node, slot]}}


def shown(run, node):
    return run.outputs[node]["text"][0]


def report(run, node="3"):
    return json.loads(run.outputs[node]["report"][0])


@pytest.fixture
def user_files(scripted):
    """The folder of the user's own files; what a test puts there goes again."""
    root = Path(scripted.base) / "user" / "__resident_llm"
    made = []

    def put(name, text):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        made.append(file)
        return file

    yield put
    for file in made:
        file.unlink(missing_ok=True)


def test_a_prompt_of_every_control_token_gives_a_normal_answer(comfy, model_path):
    prompter = Prompter.load(str(model_path))
    control = [token.content for token in prompter._tokenizer.get_added_tokens_decoder().values()]
    user = f"Say hello. Ignore this: {' '.join(control)}{''.join(control)}"
    encoded = prompter.encode(Prompt.of(user, system="You are friendly."))

    run = comfy.run_prompt(
        {
            "1": load(model_path.name, engine="auto", dtype="float32"),
            "2": prompt_node(user, "You are friendly.", llm=["1", 0]),
            "3": generate(max_tokens=24),
            "4": show("2", 1),
            "5": show("2", 2),
        }
    )

    assert run.status == "success", run.error
    told = report(run)
    assert told["num_prompt_tokens"] == encoded.num_tokens == int(shown(run, "5"))
    assert shown(run, "4") == encoded.text
    text = run.outputs["3"]["text"][0]
    assert text.strip()
    assert not [token for token in control if token in text + told["raw_text"]]
    assert told["finish"]["reason"] in ("stop", "length")


def test_a_question_about_an_end_token_is_answered_past_it(comfy, model_path):
    run = comfy.run_prompt(
        {
            "1": load(model_path.name, engine="auto", dtype="float32"),
            "2": prompt_node("Repeat after me: hello", answer_prefix="The token <|im_end|> means"),
            "3": generate(max_tokens=8),
        }
    )

    assert run.status == "success", run.error
    assert report(run)["num_output_tokens"] >= 2


def test_unwired_the_rendered_text_and_the_count_are_empty(scripted):
    run = scripted.run_prompt({"2": prompt_node(), "4": show("2", 1), "5": show("2", 2)})

    assert run.status == "success", run.error
    assert (shown(run, "4"), shown(run, "5")) == ("", "0")


def test_turns_are_chained_by_history_and_its_answer(scripted):
    run = scripted.run_prompt(
        {
            "1": load("script-quick"),
            "2": prompt_node("One?", "Be brief."),
            "3": generate(),
            "6": prompt_node("Two?", history=["2", 0], history_answer=["3", 0]),
            "7": generate(prompt="6"),
        }
    )

    assert run.status == "success", run.error
    first, second = report(run, "3")["num_prompt_tokens"], report(run, "7")["num_prompt_tokens"]
    answer = run.outputs["3"]["text"][0]
    assert second == first + len(answer) + len("<assistant><user>Two?")


def test_a_preset_of_the_users_is_offered_and_applied_and_its_cleaning_reported(scripted, user_files):
    user_files("presets/fox.md", "---\nabout: Foxes.\nclean: one_line, label\nuser: Prompt: {text}\n---\nOnly foxes.\n")

    options = scripted.get("/object_info/ResidentPrompt")["ResidentPrompt"]["input"]["optional"]["preset"]
    run = scripted.run_prompt({"1": load("script-quick"), "2": prompt_node("x", preset="my/fox"), "3": generate()})

    menu = options[1].get("options", options[0])
    assert menu == ["none", *presets.find(), "my/fox"]
    assert "my/fox: Foxes. Cleans: one_line, label." in options[1]["tooltip"]
    assert run.status == "success", run.error
    assert report(run)["raw_text"].endswith("for Prompt: x")
    assert report(run)["cleaned"] == []


def test_a_changed_preset_runs_again(scripted, user_files):
    graph = {"1": load("script-quick"), "2": prompt_node("x", preset="my/fox"), "3": generate()}
    user_files("presets/fox.md", "---\ntitle: Fox\n---\nOnly foxes.\n")
    scripted.run_prompt(graph)

    user_files("presets/fox.md", "---\ntitle: Fox\n---\nOnly red foxes, please.\n")
    run = scripted.run_prompt(graph)

    assert "2" in run.ran()


def test_a_preset_that_is_not_there_is_told_before_the_run(scripted):
    run = scripted.run_prompt({"1": load("script-quick"), "2": prompt_node("x", preset="my/gone"), "3": generate()})

    assert run.status == "rejected"
    assert "There is no preset 'my/gone'. Presets are: camera-angles" in json.dumps(run.error)


def test_stop_strings_are_one_a_line_with_escapes(scripted):
    run = scripted.run_prompt(
        {"1": load("script-quick"), "2": prompt_node("x", stop_strings="never\nblue glass\n\\n"), "3": generate()}
    )

    assert run.outputs["3"]["text"] == ["A lighthouse of "]
    assert report(run)["finish"] == {"reason": "stop", "by": "string", "text": "blue glass"}


def test_a_history_without_its_answer_is_told_on_the_node(scripted):
    run = scripted.run_prompt(
        {
            "1": load("script-quick"),
            "2": prompt_node("One?"),
            "6": prompt_node("Two?", history=["2", 0]),
            "3": generate(prompt="6"),
        }
    )

    assert run.status == "error"
    assert re.match("history is wired, but history_answer is empty", run.error["exception_message"])
