"""The page in Chinese: titles, inputs, tooltips and what the pack says itself; pinned page, and the newest (slow)."""

from __future__ import annotations

import json

import pytest

from tests.host.browser import RENDERERS, open_ui
from tools.comfyui import ROOT
from tools.frontend import NEWEST

pytestmark = pytest.mark.browser

CHINESE = {"Comfy.Locale": "zh"}
NODES, MAIN = (
    json.loads((ROOT / "locales" / "zh" / f"{name}.json").read_text(encoding="utf-8")) for name in ("nodeDefs", "main")
)
NEW_NODE = """(type) => {
    const node = LiteGraph.createNode(type);
    app.graph.add(node);
    const name = (slot) => slot.label || slot.localized_name || slot.name;
    const said = {
        title: node.title,
        widgets: Object.fromEntries((node.widgets ?? []).map((one) => [one.name, one.label ?? one.name])),
        inputs: Object.fromEntries(node.inputs.map((one) => [one.name, name(one)])),
        outputs: node.outputs.map(name),
        tooltips: Object.fromEntries(Object.entries(node.constructor.nodeData.inputs)
            .map(([name, spec]) => [name, spec.tooltip])),
    };
    app.graph.remove(node);
    return said;
}"""
NOTICE = """async (detail) => {
    const { api } = await import('/scripts/api.js');
    api.dispatchEvent(new CustomEvent('resident.notice', {detail}));
}"""


@pytest.fixture(scope="module", params=["pinned", pytest.param(NEWEST, marks=pytest.mark.slow)])
def page(request, comfy_with):
    comfy = comfy_with(settings=CHINESE) if request.param == "pinned" else request.getfixturevalue("newest_comfy")
    comfy.use_settings(CHINESE)
    with open_ui(comfy, node_types=["ResidentGenerate"]) as ui:
        yield ui
    comfy.use_settings({"Comfy.Locale": "en"})


@pytest.mark.parametrize("kind", sorted(NODES))
def test_a_nodes_title_inputs_and_outputs_are_in_chinese(page, kind):
    texts = NODES[kind]

    said = page.page.evaluate(NEW_NODE, kind)

    assert said["title"] == texts["display_name"]
    for name, label in {**said["inputs"], **said["widgets"]}.items():
        assert name not in texts["inputs"] or label == texts["inputs"][name]["name"]
    assert said["outputs"] == [one["name"] for one in texts["outputs"].values()]
    told = {name: one["tooltip"] for name, one in texts["inputs"].items() if "tooltip" in one}
    assert told.items() <= said["tooltips"].items()


def test_what_the_pack_says_itself_is_in_chinese(page):
    page.page.evaluate(NOTICE, {"kind": "is_back", "values": {"name": "tiny", "device": "cuda:0", "size": "1 GB"}})

    page.wait_for_text(
        MAIN["residentLlm"]["notices"]["is_back"].format(name="tiny", device="cuda:0", size="1 GB"), timeout_s=10
    )
    assert page.page.locator(f"[aria-label='{MAIN['residentLlm']['monitor']}']").count() == 1
    said = page.page.evaluate(NEW_NODE, "ResidentLoadLLM")
    assert said["widgets"]["more"] == MAIN["residentLlm"]["more"]


def test_a_notice_that_has_no_translation_comes_as_the_server_told_it(page):
    page.page.evaluate(NOTICE, {"kind": "of a later version", "values": {}, "text": "it happened on cuda:0"})

    page.wait_for_text("it happened on cuda:0", timeout_s=10)


def test_a_loaded_workflow_has_chinese_titles_in_both_renderers(page):
    titles = [NODES[kind]["display_name"] for kind in ("ResidentLoadLLM", "ResidentPrompt", "ResidentGenerate")]
    for renderer in RENDERERS:
        page.page.evaluate(
            "(on) => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", renderer == "nodes2"
        )
        page.drop_workflow(ROOT / "workflows" / "01-prompt-expansion.json")

        shown = page.page.evaluate("() => app.graph.nodes.map((node) => node.title)")

        assert set(titles) < set(shown), renderer
        if renderer == "nodes2":
            page.wait_for_text(titles[0], timeout_s=10)
