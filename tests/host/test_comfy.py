"""The test host itself: a real server, the events of a prompt, and the page."""

from __future__ import annotations

import pytest

from tests.host.browser import RENDERERS, open_ui
from tests.host.comfy import ComfyUI


def preview_of(text: str) -> dict[str, object]:
    """A prompt whose node 2 shows the text. Only a text that the server has not seen makes it run: of cached nodes
    the history keeps nothing."""
    return {
        "1": {"class_type": "PrimitiveString", "inputs": {"value": text}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    }


@pytest.mark.server
def test_a_prompt_is_followed_to_its_end_and_its_outputs_come_back(comfy: ComfyUI):
    run = comfy.run_prompt(preview_of("a cat on a windowsill"))

    assert run.status == "success"
    assert list(run.outputs["2"]["text"]) == ["a cat on a windowsill"]
    assert run.ran() == ["1", "2"]


@pytest.mark.server
def test_an_unchanged_prompt_runs_no_node_and_its_outputs_come_back_again(comfy: ComfyUI):
    comfy.run_prompt(preview_of("twice"))

    run = comfy.run_prompt(preview_of("twice"))

    assert sorted(run.cached) == ["1", "2"]
    assert list(run.outputs["2"]["text"]) == ["twice"]


@pytest.mark.server
def test_a_prompt_of_nobody_gives_its_outputs_too(comfy: ComfyUI):
    run = comfy.run_prompt(preview_of("of nobody"), client_id=None)

    assert run.status == "success"
    assert list(run.outputs["2"]["text"]) == ["of nobody"]


@pytest.mark.server
def test_a_prompt_that_the_server_refuses_is_rejected_with_its_reasons(comfy: ComfyUI):
    run = comfy.run_prompt({"1": {"class_type": "PreviewAny", "inputs": {}}})

    assert run.status == "rejected"
    assert run.error is not None and "1" in run.error["node_errors"]


@pytest.mark.browser
@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_page_opens_in_both_renderers_and_runs_a_graph(comfy: ComfyUI, renderer: str):
    common = {"flags": {}, "order": 0, "mode": 0, "properties": {}}
    source = {"name": "source", "type": "*", "link": 1}
    string = {"name": "STRING", "type": "STRING", "links": [1], "slot_index": 0}
    nodes = [
        {"id": 1, "type": "PrimitiveString", "pos": [100, 100], "size": [300, 80], "inputs": [], "outputs": [string]},
        {"id": 2, "type": "PreviewAny", "pos": [500, 100], "size": [300, 200], "inputs": [source], "outputs": []},
    ]
    workflow = {
        "version": 0.4,
        "last_node_id": 2,
        "last_link_id": 1,
        "nodes": [{**common, **node, "widgets_values": ["a red fox"] if node["id"] == 1 else []} for node in nodes],
        "links": [[1, 1, 0, 2, 0, "STRING"]],
        "groups": [],
        "config": {},
        "extra": {},
    }

    with open_ui(comfy, renderer=renderer) as ui:
        ui.load_workflow(workflow)
        ui.run()
        ui.page.wait_for_function(
            "() => Object.values(window.app.nodeOutputs ?? {}).some((output) => output.text?.[0] === 'a red fox')"
        )

        assert ui.page.evaluate("() => Boolean(window.LiteGraph.vueNodesMode)") == (renderer == "nodes2")
