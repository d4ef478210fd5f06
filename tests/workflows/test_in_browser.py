"""Every workflow in the real page, in both node renderers: nothing missing, no value shifted, no node over another.

One page per renderer loads all files in turn.
"""

from __future__ import annotations

import itertools
import json

import pytest

from tests.host.browser import RENDERERS, open_ui
from tests.tiny.checkpoint import write_checkpoint
from tests.workflows.files import FILES, NAMES, read
from tools.workflow_graph import to_prompt

pytestmark = pytest.mark.browser

SETTINGS = {"Comfy.Workflow.ShowMissingModelsWarning": False}
OF_THE_PAGE = ("PreviewAny",)
"""Core nodes to which the page adds widgets of its own."""
OUR_NODES = sorted({node["type"] for path in FILES for node in read(path)["nodes"] if node["type"] != "Note"})
BOXES = """() => Object.fromEntries(app.graph.nodes.map((node) => {
    let [width, height] = node.size;
    if (window.LiteGraph.vueNodesMode) {
        const shown = document.querySelector(`[data-node-id="${node.id}"]`).getBoundingClientRect();
        [width, height] = [shown.width / app.canvas.ds.scale, shown.height / app.canvas.ds.scale - 30];
    }
    return [node.id, [node.pos[0], node.pos[1] - 30, node.pos[0] + width, node.pos[1] + height]];
}))"""
"""Left, top, right, bottom of each node as it is drawn, its title included."""
STATE = """async () => ({
    prompt: (await app.graphToPrompt()).output,
    missing: app.graph.nodes.filter((node) => node.has_errors || !node.constructor.nodeData && node.type !== 'Note')
        .map((node) => node.type),
    values: Object.fromEntries(app.graph.serialize().nodes.map((node) => [node.id, node.widgets_values])),
    dialog: document.querySelector('.p-dialog, [role=dialog]')?.textContent?.slice(0, 200) ?? null,
})"""


@pytest.fixture(scope="module", params=RENDERERS)
def page(request, comfy_with):
    comfy = comfy_with()
    write_checkpoint(comfy.base / "models" / "checkpoints")
    comfy.use_settings(SETTINGS)
    with open_ui(comfy, renderer=request.param, node_types=OUR_NODES) as ui:
        ui.info = comfy.get("/object_info")
        yield ui


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_it_opens_with_all_nodes_and_values_in_their_places(page, path):
    workflow = read(path)

    page.load_workflow(workflow)
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.page.wait_for_timeout(700)
    state, boxes = page.page.evaluate(STATE), page.page.evaluate(BOXES)

    assert state["missing"] == [] and state["dialog"] is None
    wanted = to_prompt(workflow, page.info)
    assert state["prompt"].keys() == wanted.keys()
    for key, node in wanted.items():
        queued = state["prompt"][key]["inputs"]
        assert node["inputs"].items() <= queued.items(), node["class_type"]
        assert node["inputs"].keys() == queued.keys() or node["class_type"] in OF_THE_PAGE
    for node in workflow["nodes"]:
        values = state["values"][str(node["id"])] or []
        is_longer = node["type"] in OF_THE_PAGE
        assert (values[: len(node["widgets_values"])] if is_longer else values) == node["widgets_values"], node["type"]
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, json.dumps({one: a, other: b})
