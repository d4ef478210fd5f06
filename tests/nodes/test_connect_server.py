"""Connect LLM Server in the real ComfyUI, with a server that answers by script."""

import json
import threading
import time
from pathlib import Path

import pytest

from tests.nodes.conftest import generate, prompt_node
from tests.servers.scripted_server import DONE, ScriptedServer, delta, event, reply, stream

pytestmark = pytest.mark.server

CHAT = "/v1/chat/completions"
KEY = "sk-very-secret-0123456789"
HEADER = "very-secret-header-9876"


@pytest.fixture(scope="session")
def llm_server():
    with ScriptedServer() as one:
        yield one


@pytest.fixture(scope="session")
def profile_path(llm_server, tmp_path_factory):
    """Profiles as a file: one that works, one whose address swallows everything, one with a list of models."""
    path = tmp_path_factory.mktemp("profiles") / "profiles.json"
    box = {"base_url": llm_server.url, "key_env": "BOX_KEY", "headers": {"X-Secret": HEADER}}
    hole = {"base_url": "http://10.255.255.1:8000", "connect_s": 1}
    narrow = {"base_url": llm_server.url, "key_env": "BOX_KEY", "models": ["small", "big"]}
    path.write_text(json.dumps({"profiles": {"box": box, "hole": hole, "narrow": narrow}}))
    return path


@pytest.fixture
def comfy(comfy_with, profile_path):
    return comfy_with(models=[], env={"RESIDENT_LLM_PROFILES": str(profile_path), "BOX_KEY": KEY})


def connect(profile="box", model="(what the server serves)", other_model="", when_idle="keep"):
    inputs = {"profile": profile, "model": model, "other_model": other_model, "when_idle": when_idle}
    return {"class_type": "ResidentConnectServer", "inputs": inputs}


def graph(user="a cat", seed=1, **fields):
    show = {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}}
    return {"1": connect(**fields), "2": prompt_node(user), "3": generate(seed=seed), "4": show}


def echo(connection, seen):
    text = seen.body["messages"][-1]["content"]
    stream(delta("You said: "), delta(text, "stop"), DONE)(connection, seen)


def test_a_graph_gets_its_text_from_the_server(comfy, llm_server):
    llm_server.routes[CHAT] = echo

    run = comfy.run_prompt(graph())

    assert run.status == "success", run.error
    assert list(run.outputs["4"]["text"]) == ["You said: a cat"]


def test_the_menu_holds_profiles_and_models_and_no_address_and_no_key(comfy, llm_server):
    num_before = len(llm_server.seen)

    began = time.monotonic()
    node = comfy.get("/object_info/ResidentConnectServer")
    text = json.dumps(node)

    assert time.monotonic() - began < 5
    inputs = node["ResidentConnectServer"]["input"]["required"]
    assert {"box", "hole", "narrow", "local-vllm"} <= set(options(inputs["profile"]))
    assert {"small", "big"} <= set(options(inputs["model"]))
    assert not any(secret in text for secret in (KEY, HEADER, "BOX_KEY", llm_server.url, "10.255"))
    assert len(llm_server.seen) == num_before


def options(combo):
    kind, fields = combo
    return kind if isinstance(kind, list) else fields["options"]


def test_neither_key_nor_header_is_anywhere_that_a_graph_goes(comfy, llm_server):
    llm_server.routes[CHAT] = reply({"error": {"message": f"no, {KEY}, no, {HEADER}"}}, 500)
    events = []

    failed = comfy.run_prompt(graph("a dog"), on_event=events.append)
    llm_server.routes[CHAT] = echo
    image = {
        "5": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["5", 0], "filename_prefix": "secret"}},
    }
    prompt = {**graph("a bird"), **image}
    workflow = {"workflow": {"id": "w", "nodes": [], "extra": prompt}}
    good = comfy.run_prompt(prompt, on_event=events.append, extra_data={"extra_pnginfo": workflow})

    assert (failed.status, good.status) == ("error", "success")
    assert llm_server.seen[-1].headers["authorization"] == f"Bearer {KEY}"
    assert llm_server.seen[-1].headers["x-secret"] == HEADER
    images = [path.read_bytes() for path in Path(comfy.base).rglob("secret*.png")]
    places = [
        json.dumps(comfy.get("/history")),
        json.dumps(comfy.get("/queue")),
        comfy.log_path.read_text(errors="replace"),
        "".join(map(repr, events)),
        json.dumps(failed.error, default=str),
        *(data.decode("latin-1") for data in images),
    ]
    assert images
    for secret in (KEY, HEADER):
        assert not any(secret in place for place in places)


def test_an_error_of_the_server_fails_the_node_and_nothing_after_it_runs(comfy, llm_server):
    llm_server.routes[CHAT] = stream(delta("half an ans"), event(error={"message": "engine died"}), DONE)

    run = comfy.run_prompt(graph("a fox"))

    assert run.status == "error"
    assert "engine died" in run.error["exception_message"]
    assert "4" not in run.ran()


def test_a_server_that_is_not_there_is_one_sentence_on_the_node(comfy):
    run = comfy.run_prompt(graph(profile="hole"))

    assert run.status == "error"
    assert "10.255.255.1:8000" in run.error["exception_message"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"profile": "nope"}, "There is no server profile 'nope'"),
        ({"profile": "narrow", "other_model": "huge"}, "does not allow the model 'huge'"),
    ],
)
def test_what_a_profile_does_not_hold_is_refused_before_anything_runs(comfy, fields, sentence):
    run = comfy.run_prompt(graph(**fields))

    assert run.status == "rejected"
    assert sentence in json.dumps(run.error)


def test_an_interrupt_while_the_server_says_nothing_closes_its_socket(comfy, llm_server):
    asked, closed = threading.Event(), threading.Event()

    def silent(connection, seen):
        asked.set()
        if connection.wait_for_close(30):
            closed.set()

    llm_server.routes[CHAT] = silent

    def interrupt():
        asked.wait(30)
        comfy.interrupt()

    threading.Thread(target=interrupt, daemon=True).start()
    run = comfy.run_prompt(graph("a whale"), timeout_s=60)

    assert run.status == "interrupted"
    assert closed.wait(10)
