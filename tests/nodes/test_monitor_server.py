"""The monitor's routes and its node in the real ComfyUI."""

import json
import random
import struct
import urllib.error
import urllib.request
import zlib

import pytest

from tests.nodes.conftest import free, generate, graph, load_llm

pytestmark = pytest.mark.server


def ask(comfy, path, body=None, headers=None):
    """(status, JSON) of a GET, or of a POST with JSON where there is a body."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})} if data is not None else headers or {}
    request = urllib.request.Request(comfy.url + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def monitor(comfy, query=""):
    status, state = ask(comfy, f"/resident/v1/monitor{query}")
    assert status == 200
    return state


def fresh(model="script-quick", user="a cat"):
    return graph(model, user, seed=random.SystemRandom().randrange(2**40))


def only_model(comfy, model="script-quick"):
    """The state's row of one model, the only one loaded."""
    comfy.run_prompt({"1": free()})
    comfy.run_prompt(fresh(model))
    [row] = monitor(comfy)["models"]
    return row


def test_the_state_tells_models_devices_and_runs_but_no_text_and_no_path(scripted):
    row = only_model(scripted)
    run = scripted.run_prompt(fresh(user="a secret wish"))

    state = monitor(scripted)
    report = json.loads(run.outputs["3"]["report"][0])
    told = state["runs"][-1]["reports"][0]
    assert (row["name"], row["engine"], row["bytes"]["weights"]) == ("script-quick", "scripted", 1000)
    assert [one["device"] for one in state["devices"]] == ["cpu"]
    parts = state["devices"][0]["parts"]
    assert parts["weights"] == 1000
    assert sum(parts.values()) == state["devices"][0]["total_bytes"]
    assert (told["num_output_tokens"], told["ttft_s"]) == (report["num_output_tokens"], report["ttft_s"])
    assert state["live"] == []
    text = json.dumps(state)
    assert "secret" not in text and "lighthouse" not in text
    assert str(scripted.base) not in text


def test_the_same_route_answers_below_api_and_leaves_out_what_the_page_has(scripted):
    scripted.run_prompt(fresh())
    state = monitor(scripted)

    _, later = ask(scripted, f"/api/resident/v1/monitor?since={state['at']}&after={state['runs'][-1]['number']}")

    assert (later["runs"], [one for one in later["samples"] if one["at"] <= state["at"]]) == ([], [])
    assert ask(scripted, "/resident/v1/monitor?after=x")[0] == 400


def test_a_live_run_is_told_with_its_phase_and_counts(scripted):
    seen = []

    def look(event):
        if event.type == "resident.stream":
            seen.extend(monitor(scripted)["live"])

    scripted.run_prompt({"1": free()})
    scripted.run_prompt(fresh("script-slow"), on_event=look)

    assert {one["phase"] for one in seen} >= {"load", "prefill", "decode"}
    assert max(one["num_tokens"] for one in seen) > min(one["num_tokens"] for one in seen)
    assert monitor(scripted)["live"] == []


def test_free_unloads_a_listed_model_and_only_that(scripted):
    row = only_model(scripted)

    assert ask(scripted, "/resident/v1/free", {"id": row["id"]}) == (
        200,
        {"done": "script-quick is unloaded, 1.0 kB freed."},
    )
    assert monitor(scripted)["models"] == []
    assert ask(scripted, "/resident/v1/free", {"id": row["id"]})[0] == 404


def test_free_refuses_a_model_in_use_with_a_sentence_and_the_run_goes_on(scripted):
    row, answers = only_model(scripted, "script-long"), []

    def interfere(event):
        if event.type == "resident.stream" and event.data["phase"] == "decode" and not answers:
            answers.append(ask(scripted, "/resident/v1/free", {"id": row["id"]}))

    run = scripted.run_prompt(fresh("script-long"), on_event=interfere)

    assert answers == [(409, {"error": "script-long is in use. Free it when its run is over, or cancel the run."})]
    assert run.outputs["3"]["text"][0].endswith("word end")


def test_keep_has_a_model_stay_that_was_to_be_released_and_can_be_taken_back(scripted):
    row, kept = only_model(scripted, "script-slow"), []
    loader = load_llm("script-slow", when_idle="release")

    def press(event):
        if event.type == "resident.stream" and not kept:
            kept.append(ask(scripted, "/resident/v1/keep", {"id": row["id"], "keep": True})[0])

    scripted.run_prompt({**fresh("script-slow", "one"), "1": loader}, on_event=press)
    stayed = monitor(scripted)["models"]
    ask(scripted, "/resident/v1/keep", {"id": row["id"], "keep": False})
    scripted.run_prompt({**fresh("script-slow", "two"), "1": loader})

    assert kept == [200]
    assert [(one["name"], one["is_kept"]) for one in stayed] == [("script-slow", True)]
    assert monitor(scripted)["models"] == []


@pytest.mark.parametrize("route", ["free", "keep"])
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"id": "x"}, {"Content-Type": "text/plain"}, 415),
        ({"id": "x"}, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"id": "x"}, {"Origin": "http://evil.example", "Host": "comfy.lan:8188"}, 403),
        ({"id": "x"}, {"Origin": "null", "Host": "comfy.lan:8188"}, 403),
        ({"id": "x"}, {"Sec-Fetch-Site": "cross-site"}, 403),
        (b"{" + b" " * 5000, {}, 413),
        (b"[", {}, 400),
        ({"id": 7}, {}, 400),
        ({"id": "../../etc", "keep": True}, {}, 404),
    ],
)
def test_what_acts_is_refused_unless_all_is_right(scripted, route, body, headers, status):
    row = only_model(scripted)
    if isinstance(body, dict) and body["id"] == "x":
        body = {"id": row["id"], "keep": True}

    told, answer = ask(scripted, f"/resident/v1/{route}", body, headers)

    assert (told, isinstance(answer["error"], str)) == (status, True)
    assert [one["id"] for one in monitor(scripted)["models"]] == [row["id"]]
    assert not monitor(scripted)["models"][0]["is_kept"]


def png(data):
    """(width, height, raw rows) of a PNG."""
    width, height = struct.unpack(">II", data[16:24])
    parts, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            parts += data[at + 8 : at + 8 + length]
        at += 12 + length
    return width, height, zlib.decompress(parts)


def saved(comfy, run, node):
    [image] = run.outputs[node]["images"]
    return png((comfy.base / "output" / image["subfolder"] / image["filename"]).read_bytes())


def test_the_node_passes_an_image_on_runs_each_time_and_draws_the_prompt(scripted):
    scripted.run_prompt({"1": free()})
    prompt = {
        **fresh("script-slow"),
        "5": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 32, "batch_size": 1, "color": 0x3366CC}},
        "6": {"class_type": "ResidentMonitor", "inputs": {"value": ["5", 0]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "passed"}},
        "8": {"class_type": "ResidentMonitor", "inputs": {"value": ["3", 0]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 2], "filename_prefix": "timeline"}},
        "10": {"class_type": "PreviewAny", "inputs": {"source": ["8", 1]}},
    }

    run = scripted.run_prompt(prompt)
    again = scripted.run_prompt(prompt)

    width, height, rows = saved(scripted, run, "7")
    state = json.loads(run.outputs["10"]["text"][0])
    assert run.status == "success", run.error
    assert (width, height) == (64, 32)
    assert set(rows[1:4]) == {0x33, 0x66, 0xCC}
    assert saved(scripted, run, "9")[:2] == (960, 400)
    assert len(set(saved(scripted, run, "9")[2])) > 8
    assert [one["name"] for one in state["models"]] == ["script-slow"]
    assert state["runs"][-1]["num_tokens"] == json.loads(run.outputs["3"]["report"][0])["num_output_tokens"]
    assert {"6", "8"} <= set(again.ran())
    assert "3" not in again.ran()
    assert json.loads(again.outputs["10"]["text"][0])["runs"] == []


def test_a_text_passes_through_unchanged(scripted):
    prompt = {
        **fresh(),
        "4": {"class_type": "ResidentMonitor", "inputs": {"value": ["3", 0]}},
        "5": {"class_type": "PreviewAny", "inputs": {"source": ["4", 0]}},
        "6": generate(llm="1", prompt="4", seed=random.SystemRandom().randrange(2**40)),
    }

    run = scripted.run_prompt(prompt)

    assert run.outputs["5"]["text"] == run.outputs["3"]["text"]
    assert run.status == "success"
