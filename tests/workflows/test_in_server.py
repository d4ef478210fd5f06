"""The workflows in a real ComfyUI: in step with its nodes, and run by them on the CPU."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.hub_server import serving
from tests.servers.scripted_server import DONE, ScriptedServer, delta, stream
from tests.tiny import make_model
from tests.tiny.checkpoint import write_checkpoint
from tests.workflows.files import FILES, FOLDER, GOLDEN, NAMES, quick, read
from tools.model import GGUF
from tools.workflow_graph import folded_of, to_prompt, widgets_of
from tools.workflows import stale

pytestmark = pytest.mark.server

ON_CPU = [name for name in NAMES if not name.startswith(("07", "08", "12"))]
"""07 needs a vLLM server, 08 a GPU, 12 a hub."""


@pytest.fixture(scope="module")
def server(comfy_with):
    """The shared server, with the checkpoint among its models."""
    comfy = comfy_with()
    write_checkpoint(comfy.base / "models" / "checkpoints")
    return comfy


@pytest.fixture(scope="module")
def info(server) -> dict[str, Any]:
    return server.get("/object_info")


def test_files_and_locales_are_what_the_nodes_make_of_their_descriptions(info):
    assert [path.name for path in stale(info)] == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_node_has_as_many_values_as_its_schema_has_widgets(info, path):
    for node in read(path)["nodes"]:
        if node["type"] != "Note":
            assert len(node["widgets_values"]) == len(widgets_of(info, node["type"])), node["type"]


def images_of(server, run):
    """The pictures that a run saved, as arrays."""
    names = [
        image["subfolder"] + "/" + image["filename"]
        for output in run.outputs.values()
        for image in output.get("images", ())
    ]
    return [np.asarray(Image.open(server.base / "output" / name)) for name in names]


@pytest.mark.parametrize("name", ON_CPU)
def test_it_runs_through_to_text_and_image(server, info, name):
    workflow = read(FOLDER / f"{name}.json")

    run = server.run_prompt(quick(to_prompt(workflow, info)), timeout_s=300)

    assert run.status == "success", run.error
    types = {str(node["id"]): node["type"] for node in workflow["nodes"]}
    for node_id, node_type in types.items():
        if node_type == "ResidentGenerate":
            assert all(json.loads(one)["num_output_tokens"] for one in run.outputs[node_id]["report"])
    images = images_of(server, run)
    assert len(images) >= sum(node_type == "SaveImage" for node_type in types.values())
    for image in images:
        assert image.shape[2] == 3 and image.std() > 1


def test_each_idea_of_the_list_makes_an_image_of_its_own(server, info):
    prompt = quick(to_prompt(read(FOLDER / "03-many-ideas.json"), info))

    run = server.run_prompt(prompt, timeout_s=300)

    images = images_of(server, run)
    assert len(images) == 3
    assert not np.array_equal(images[0], images[1]) and not np.array_equal(images[1], images[2])


def test_the_second_engine_only_takes_another_loader(server, info, gguf_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp needs the package xllamacpp")
    from tools.comfyui import place_model

    place_model(gguf_path, server.base / "models" / "LLM")
    prompt = quick(to_prompt(read(FOLDER / "05-three-engines.json"), info))
    loader = next(key for key, node in prompt.items() if node["inputs"].get("model") == GGUF)
    generate = next(key for key, node in prompt.items() if node["class_type"] == "ResidentGenerate")
    prompt[generate]["inputs"]["llm"] = [loader, 0]

    run = server.run_prompt(prompt, timeout_s=300)

    assert json.loads(run.outputs[generate]["report"][0])["engine"] == "llamacpp"


def test_the_server_stage_goes_on_to_an_image(server, info):
    with ScriptedServer() as llm_server:
        answer = stream(delta("a lighthouse in a storm", "stop"), DONE)
        llm_server.routes["/v1/chat/completions"] = answer
        profiles = server.base / "user" / "__resident_llm" / "profiles.json"
        profiles.parent.mkdir(parents=True, exist_ok=True)
        profiles.write_text(json.dumps({"profiles": {"local-vllm": {"base_url": llm_server.url}}}))

        run = server.run_prompt(quick(to_prompt(read(FOLDER / "07-server-that-sleeps.json"), info)))

        profiles.unlink()
    assert run.status == "success", run.error
    assert len(images_of(server, run)) == 1


def test_a_model_of_the_users_list_is_fetched_and_writes_in_the_same_run(comfy_with, tmp_path):
    """The list lies where the workflow's note says, and holds the line that it names."""
    pytest.importorskip("huggingface_hub")
    workflow = read(FOLDER / "12-get-a-model.json")
    (note,) = [node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "Note"]
    (place,) = re.findall(r"^ComfyUI/(\S+)$", note, flags=re.MULTILINE)
    (repo,) = re.findall(r"press Run:\n(\S+)$", note, flags=re.MULTILINE)
    files = {path.name: path.read_bytes() for path in make_model(tmp_path / "tiny").iterdir()}
    with serving({repo: files}) as hub:
        server = comfy_with(models=[], env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
        prompt = quick(to_prompt(workflow, server.get("/object_info")))
        refused = server.run_prompt(prompt)
        list_file = server.base / place
        list_file.parent.mkdir(parents=True, exist_ok=True)
        list_file.write_text(f"{repo}\n")

        run = server.run_prompt(prompt, timeout_s=300)

    assert refused.status == "rejected"
    assert f"runtime download {repo}" in str(refused.error) and str(list_file) in str(refused.error)
    assert run.status == "success", run.error
    (report,) = [json.loads(output["report"][0]) for output in run.outputs.values() if "report" in output]
    assert report["num_output_tokens"] == 6
    name = repo.rpartition("/")[2]
    assert (server.base / "models" / "LLM" / name / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert [name] in [output.get("text") for output in run.outputs.values()]


def test_every_setting_that_is_folded_away_has_a_default_by_which_the_page_knows_it_is_not_in_use(info):
    folded = {f"{kind}.{name}": one for kind in info for name, one in folded_of(info, kind).items()}

    assert len(folded) > 20
    assert [name for name, options in folded.items() if "default" not in options] == []


def test_a_missing_checkpoint_is_told_at_once_and_the_text_is_made_all_the_same(server, info):
    """ComfyUI marks the loader, leaves the image out, and runs what else there is."""
    prompt = quick(to_prompt(read(FOLDER / "02-prompt-to-image.json"), info))
    for node in prompt.values():
        if node["class_type"] == "CheckpointLoaderSimple":
            node["inputs"]["ckpt_name"] = "nowhere.safetensors"

    told = server.post("/prompt", {"prompt": prompt})
    run = server.run_prompt(prompt)

    (node_errors,) = told["node_errors"].values()
    assert node_errors["class_type"] == "CheckpointLoaderSimple"
    assert "ckpt_name: 'nowhere.safetensors' not in" in node_errors["errors"][0]["details"]
    assert run.status == "success"
    assert images_of(server, run) == [] and any("report" in output for output in run.outputs.values())


def test_a_missing_awq_model_is_told_with_what_there_is(server, info):
    run = server.run_prompt(to_prompt(read(FOLDER / "08-awq-exllamav2-q4-cache.json"), info))

    assert run.status == "rejected"
    assert "Qwen2.5-7B-Instruct-AWQ" in json.dumps(run.error) and "Pick one of them" in json.dumps(run.error)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_released_workflow_keeps_its_values_for_ever(info, path):
    """The values by name were written down at the release; widgets that came later have defaults and are not asked."""
    released = read(path)

    now = to_prompt(released["workflow"], info)

    for node_id, node in released["prompt"].items():
        assert now[node_id]["class_type"] == node["class_type"]
        assert {name: now[node_id]["inputs"].get(name) for name in node["inputs"]} == node["inputs"]


def test_a_text_is_in_the_workflow_of_its_image_also_when_it_was_not_written_anew(server, info):
    workflow = read(FOLDER / "02-prompt-to-image.json")
    prompt = quick(to_prompt(workflow, info))
    (generate,) = [key for key, node in prompt.items() if node["class_type"] == "ResidentGenerate"]
    (sampler,) = [key for key, node in prompt.items() if node["class_type"] == "KSampler"]
    prompt[generate]["inputs"]["seed"] = 4711
    found = []
    for seed in (1, 2):
        prompt[sampler]["inputs"]["seed"] = seed

        run = server.run_prompt(prompt, extra_data={"extra_pnginfo": {"workflow": workflow}}, timeout_s=300)

        (image,) = [one for output in run.outputs.values() for one in output.get("images", ())]
        with Image.open(server.base / "output" / image["subfolder"] / image["filename"]) as picture:
            saved = json.loads(picture.info["workflow"])
        (node,) = [one for one in saved["nodes"] if str(one["id"]) == generate]
        found.append((generate in run.cached, node["properties"]["resident_text"], run.outputs[generate]["text"]))

    assert [is_cached for is_cached, _, _ in found] == [False, True]
    assert all(text == {generate: list(answer)} for _, text, answer in found)
