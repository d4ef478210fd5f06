"""Settings that few need, folded away on the nodes of the real page: the pinned one and, as a slow test, the newest."""

from __future__ import annotations

import copy
import itertools

import pytest

from tests.host.browser import open_ui
from tests.workflows.files import FOLDER, read
from tools.frontend import NEWEST

pytestmark = pytest.mark.browser

WORKFLOW = FOLDER / "01-prompt-expansion.json"
VISIBLE = """(type) => {
    const node = app.graph.nodes.find((node) => node.type === type);
    return node.widgets.filter((widget) => node.isWidgetVisible(widget)).map((widget) => widget.name);
}"""
CLICK_AT = """(type) => {
    const node = app.graph.nodes.find((node) => node.type === type);
    const button = node.widgets.find((widget) => widget.name === 'more');
    const { scale, offset } = app.canvas.ds;
    const box = app.canvas.canvas.getBoundingClientRect();
    return [box.left + (node.pos[0] + node.size[0] / 2 + offset[0]) * scale,
        box.top + (node.pos[1] + button.last_y + 10 + offset[1]) * scale];
}"""
HEIGHT = "(type) => app.graph.nodes.find((node) => node.type === type).size[1]"
LABEL = """(type) => app.graph.nodes.find((node) => node.type === type).widgets
    .find((widget) => widget.name === 'more').label"""
LAYOUT = """(type) => {
    const node = app.graph.nodes.find((node) => node.type === type);
    app.canvas.draw(true, true);
    const widgets = node.widgets.filter((widget) => node.isWidgetVisible(widget));
    const sockets = widgets.map((widget) => node.inputs.findIndex((input) => input.widget?.name === widget.name));
    return {
        tops: widgets.map((widget) => widget.last_y),
        hits: sockets.filter((at) => at >= 0)
            .map((at) => [node.inputs[at].name, node.getInputOnPos(node.getInputPos(at))?.name]),
    };
}"""
VALUES = "() => Object.fromEntries(app.graph.serialize().nodes.map((node) => [node.id, node.widgets_values]))"
QUEUED = "async () => (await app.graphToPrompt()).output"


@pytest.fixture(scope="module", params=["pinned", pytest.param(NEWEST, marks=pytest.mark.slow)])
def page(request, comfy_with):
    comfy = comfy_with() if request.param == "pinned" else request.getfixturevalue("newest_comfy")
    with open_ui(comfy, renderer="classic", node_types=["ResidentGenerate"]) as ui:
        yield ui


def click_more(page, kind):
    """Click once the view has come to rest, and wait until the click has done its work."""
    at = None
    while at != (at := page.page.evaluate(CLICK_AT, kind)):
        page.page.evaluate("() => app.canvas.draw(true, true)")
        page.page.wait_for_timeout(300)
    before = page.page.evaluate(LABEL, kind)
    page.page.mouse.click(*at)
    page.page.wait_for_function(f"([type, before]) => ({LABEL})(type) !== before", arg=[kind, before])
    page.page.wait_for_timeout(300)


def test_the_first_workflow_shows_a_newcomer_the_settings_that_matter(page):
    page.drop_workflow(WORKFLOW)

    shown = {kind: page.page.evaluate(VISIBLE, f"Resident{kind}") for kind in ("LoadLLM", "Prompt", "Generate")}

    assert shown == {
        "LoadLLM": ["model", "engine", "context_len", "when_idle", "more"],
        "Prompt": ["system", "user", "preset", "thinking", "more"],
        "Generate": ["max_tokens", "seed", "control_after_generate", "more", "stream"],
    }


def test_a_click_shows_all_and_another_folds_them_and_no_value_moves(page):
    page.drop_workflow(WORKFLOW)
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.page.wait_for_timeout(700)
    before = [page.page.evaluate(one) for one in (VALUES, QUEUED)]
    height, label = page.page.evaluate(HEIGHT, "ResidentLoadLLM"), page.page.evaluate(LABEL, "ResidentLoadLLM")

    click_more(page, "ResidentLoadLLM")
    shown, unfolded = page.page.evaluate(VISIBLE, "ResidentLoadLLM"), page.page.evaluate(HEIGHT, "ResidentLoadLLM")
    other_label = page.page.evaluate(LABEL, "ResidentLoadLLM")
    between = [page.page.evaluate(one) for one in (VALUES, QUEUED)]
    click_more(page, "ResidentLoadLLM")

    assert {"device", "dtype", "attention", "kv_cache", "host_copy_gb", "sums"} < set(shown)
    assert unfolded > height == page.page.evaluate(HEIGHT, "ResidentLoadLLM")
    assert (label, other_label) == ("more settings", "fewer settings")
    assert "dtype" not in page.page.evaluate(VISIBLE, "ResidentLoadLLM")
    assert before == between == [page.page.evaluate(one) for one in (VALUES, QUEUED)]


def test_what_is_folded_leaves_no_gap_and_catches_no_link(page):
    page.drop_workflow(WORKFLOW)
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.page.wait_for_timeout(700)

    layout = page.page.evaluate(LAYOUT, "ResidentLoadLLM")

    steps = [below - above for above, below in itertools.pairwise(layout["tops"])]
    assert len(steps) == 4 and max(steps) < 30
    assert len(layout["hits"]) == 4 and all(wanted == hit for wanted, hit in layout["hits"])


def test_a_setting_in_use_is_never_hidden(page):
    page.load_workflow(read(FOLDER / "04-thinking-budget.json"))

    assert {"thinking_budget", "on_cut_thinking"} < set(page.page.evaluate(VISIBLE, "ResidentGenerate"))
    assert "dtype" not in page.page.evaluate(VISIBLE, "ResidentLoadLLM")


def test_what_the_user_folded_or_unfolded_is_saved_and_comes_back(page):
    workflow = copy.deepcopy(read(FOLDER / "04-thinking-budget.json"))
    for node in workflow["nodes"]:
        if node["type"] in ("ResidentGenerate", "ResidentLoadLLM"):
            node["showAdvanced"] = node["type"] == "ResidentLoadLLM"

    page.load_workflow(workflow)

    assert "thinking_budget" not in page.page.evaluate(VISIBLE, "ResidentGenerate")
    assert "dtype" in page.page.evaluate(VISIBLE, "ResidentLoadLLM")
    saved = {node["type"]: node.get("showAdvanced") for node in page.page.evaluate("() => app.graph.serialize().nodes")}
    assert (saved["ResidentGenerate"], saved["ResidentLoadLLM"]) == (False, True)


def test_a_new_node_is_as_tall_as_what_it_shows(page):
    sizes = page.page.evaluate(
        """() => {
            const node = LiteGraph.createNode('ResidentLoadLLM');
            app.graph.add(node);
            const sizes = [node.size[1], node.computeSize()[1], node.widgets.filter((one) => one.advanced).length];
            app.graph.remove(node);
            return sizes;
        }"""
    )

    assert sizes[0] == sizes[1] and sizes[2] == 6
