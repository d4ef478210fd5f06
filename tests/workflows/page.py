"""A workflow as the page shows it, held against its file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tests.host.browser import UI
from tests.workflows.files import FILES, read
from tools.workflow_graph import to_prompt

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
SHOWN = """(type) => app.graph.nodes.find((node) => node.type === type)?.widgets
    .find((widget) => ['stream', 'review'].includes(widget.name))?.element.textContent ?? ''"""
"""What the display on the node of a type says."""
STATE = """async () => ({
    prompt: (await app.graphToPrompt()).output,
    missing: app.graph.nodes.filter((node) => !node.constructor.nodeData && node.type !== 'Note')
        .map((node) => node.type),
    values: Object.fromEntries(app.graph.serialize().nodes.map((node) => [node.id, node.widgets_values])),
    dialog: document.querySelector('.p-dialog, [role=dialog]')?.textContent?.slice(0, 200) ?? null,
})"""


def check_opened(page: UI, info: dict[str, Any], path: Path) -> None:
    """Open a workflow: all nodes are there, each value is in its place, and no node lies on another."""
    workflow = read(path)

    page.load_workflow(workflow)
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.page.wait_for_timeout(700)
    state, boxes = page.page.evaluate(STATE), page.page.evaluate(BOXES)

    assert (state["missing"], state["dialog"]) == ([], None), (state["missing"], state["dialog"])
    wanted = to_prompt(workflow, info)
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


def run_and_wait(page: UI, kind: str, what: str) -> None:
    """Press Run and wait until the display of the node of this type says something."""
    page.run()
    page.page.wait_for_function(f"([kind, what]) => ({SHOWN})(kind).includes(what)", arg=[kind, what], timeout=120_000)
