"""The live text in the real page, in both node renderers."""

import json
import random

import pytest

from tests.host.browser import RENDERERS, open_ui
from tests.nodes.conftest import REPLY, free
from tests.nodes.stub_host import ROOT

pytestmark = pytest.mark.browser

WORKFLOW = ROOT / "workflows" / "01-prompt-expansion.json"
SHOWN = """(id) => {
    let node = null, graph = app.rootGraph ?? app.graph;
    for (const part of String(id).split(':')) {
        node = graph.getNodeById(part) ?? graph.getNodeById(+part);
        graph = node.subgraph;
    }
    const element = node.widgets.find((widget) => widget.name === 'stream').element;
    const part = (name) => element.querySelector(name)?.textContent ?? '';
    return {text: part('.resident-stream-body'), status: part('.resident-stream-status')};
}"""


@pytest.fixture(scope="module", params=RENDERERS)
def page(request, comfy_with, script_models):
    """One open page per renderer."""
    comfy = comfy_with(models=script_models, env={"RESIDENT_LLM_SCRIPTED": "1"})
    with open_ui(comfy, renderer=request.param, node_types=["ResidentGenerate"]) as ui:
        ui.comfy, ui.renderer = comfy, request.param
        yield ui


def workflow(model, user="a cat", id=None):
    """Workflow number one with a scripted model, and a seed that was not used before."""
    graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in graph["nodes"]}
    nodes[1]["widgets_values"][:2] = [model, "scripted"]
    nodes[2]["widgets_values"][1] = user
    nodes[4]["widgets_values"][:2] = [0, random.SystemRandom().randrange(2**40)]
    graph["id"] = id or f"00000000-0000-4000-8000-{random.SystemRandom().randrange(16**12):012x}"
    return graph


def shown(ui, node=4):
    return ui.page.evaluate(SHOWN, node)


def wait_for(ui, what, node=4, key="text"):
    ui.page.wait_for_function(f"([id, what]) => ({SHOWN})(id).{key}.includes(what)", arg=[node, what], timeout=30_000)


def is_visible(ui, node=4):
    return ui.page.evaluate(
        """(id) => { const box = app.graph.getNodeById(id).widgets.find((w) => w.name === 'stream').element
            .getBoundingClientRect(); return box.width > 100 && box.height > 100; }""",
        node,
    )


def test_text_grows_while_the_graph_runs(page):
    page.comfy.run_prompt({"1": free()})
    page.load_workflow(workflow("script-slow"))

    page.run()
    wait_for(page, "loading", key="status")
    wait_for(page, "prefill", key="status")
    wait_for(page, "A lighthouse")
    first = shown(page)["text"]
    wait_for(page, REPLY.replace("{prompt}", "a cat") * 2)

    assert len(first) < len(shown(page)["text"])
    wait_for(page, "first after", key="status")
    assert is_visible(page)


def test_a_cached_run_shows_the_text_again(page):
    graph = workflow("script-quick")
    page.load_workflow(graph)
    page.run()
    wait_for(page, "for a cat")
    page.load_workflow({**graph, "id": workflow("script-quick")["id"]})
    assert shown(page)["text"] == ""

    page.run()

    wait_for(page, "for a cat")


def test_after_a_reload_the_text_is_still_there(page):
    page.load_workflow(workflow("script-quick", "a reload"))
    page.run()
    wait_for(page, "first after", key="status")
    page.page.wait_for_timeout(1500)  # the page keeps its workflow for a reload a moment after a change

    page.reload()
    page.page.wait_for_function("() => app.graph.getNodeById(4)")

    wait_for(page, "for a reload")


def test_a_reload_in_the_middle_loses_nothing(page):
    page.load_workflow(workflow("script-long"))
    page.page.wait_for_timeout(1500)
    page.run()
    wait_for(page, "word word word")

    page.reload()
    page.page.wait_for_function("() => app.graph.getNodeById(4)")

    wait_for(page, "tok/s", key="status")
    wait_for(page, "word " * 400 + "end")


def test_a_switch_of_the_renderer_in_the_middle_loses_nothing(page):
    page.load_workflow(workflow("script-long"))
    page.run()
    wait_for(page, "word word word")

    setting = "(on) => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)"
    page.page.evaluate(setting, page.renderer == "classic")
    try:
        wait_for(page, "word " * 400 + "end")
        assert is_visible(page)
    finally:
        page.page.evaluate(setting, page.renderer != "classic")


def test_a_run_that_ends_while_another_workflow_is_on_screen_shows_its_text_in_its_own(page):
    first, second = workflow("script-long"), workflow("script-quick")
    page.load_workflow(first)
    page.run()
    wait_for(page, "word word word")

    page.load_workflow(second)
    while page.comfy.get("/queue")["queue_running"]:
        page.page.wait_for_timeout(200)
    page.page.wait_for_timeout(500)  # what the server has said arrives
    elsewhere = shown(page)["text"]
    page.load_workflow(first)

    wait_for(page, "word " * 400 + "end")
    wait_for(page, "first after", key="status")
    assert elsewhere == ""


def test_one_fault_of_the_page_while_drawing_does_not_end_the_live_text(page):
    page.load_workflow(workflow("script-long"))
    page.page.evaluate(
        """() => {
            const graph = app.rootGraph ?? app.graph, real = graph.getNodeById;
            window.numFaults = 0;
            graph.getNodeById = function (id) {
                if (!new Error().stack.includes('drawAll')) return real.call(this, id);
                delete graph.getNodeById;
                window.numFaults += 1;
                throw new Error('a fault of the page');
            };
        }"""
    )

    page.run()

    wait_for(page, "word word word")
    assert page.page.evaluate("() => window.numFaults") == 1


def test_inside_a_subgraph_the_text_finds_its_node(page):
    page.load_workflow(workflow("script-slow"))
    wrapper = page.page.evaluate(
        """() => String(app.graph.convertToSubgraph(new Set(app.graph.nodes.filter((n) => n.id !== 5))).node.id)"""
    )
    page.run()
    inner = f"{wrapper}:4"

    wait_for(page, "A lighthouse", node=inner)
    page.page.evaluate("(id) => app.canvas.setGraph(app.graph.getNodeById(+id).subgraph)", wrapper)
    wait_for(page, REPLY.replace("{prompt}", "a cat") * 2, node=inner)
    page.wait_for_text("A lighthouse of blue glass")

    page.page.evaluate("() => app.canvas.setGraph(app.rootGraph ?? app.graph)")


def test_two_nodes_show_their_own_texts(page):
    graph = workflow("script-quick", "the first")
    other = json.loads(json.dumps(graph["nodes"][3]))
    prompt = json.loads(json.dumps(graph["nodes"][1]))
    prompt.update(id=7, pos=[430, 640])
    prompt["widgets_values"][1] = "the second"
    prompt["outputs"][0]["links"] = [5]
    other.update(id=6, pos=[860, 640])
    for slot, link in zip(other["inputs"], (4, 5, None), strict=True):
        slot["link"] = link
    graph["nodes"] += [other, prompt]
    graph["links"] += [[4, 1, 0, 6, 0, "RESIDENT_LLM"], [5, 7, 0, 6, 1, "RESIDENT_PROMPT"]]
    graph["last_node_id"], graph["last_link_id"] = 7, 5
    page.load_workflow(graph)

    page.run()

    wait_for(page, "for the first", node=4)
    wait_for(page, "for the second", node=6)


def test_what_the_model_writes_is_never_markup(page):
    page.load_workflow(workflow("script-markup"))

    page.run()

    wait_for(page, "<img src=x onerror='window.wasRun=1'> **bold** a cat")
    assert page.page.evaluate("() => window.wasRun") is None


def test_thinking_is_shown_apart_and_folded_away(page):
    page.load_workflow(workflow("script-thinks"))

    page.run()

    wait_for(page, "A cat, then.")
    wait_for(page, "first after", key="status")
    folded = (
        "() => app.graph.getNodeById(4).widgets.find((w) => w.name === 'stream').element.querySelector('details').open"
    )
    assert page.page.evaluate(folded) is False


def test_the_saved_workflow_and_the_queued_prompt_hold_no_output(page):
    page.load_workflow(workflow("script-quick"))
    page.run()
    wait_for(page, "first after", key="status")

    saved, queued = page.page.evaluate(
        "async () => [JSON.stringify(app.graph.serialize()), JSON.stringify((await app.graphToPrompt()).output)]"
    )

    assert "lighthouse of blue" not in saved + queued
    assert json.loads(queued)["4"]["inputs"].keys() == {
        *("llm", "prompt", "sampling", "max_tokens", "seed", "thinking_budget", "on_cut_thinking"),
    }


def test_an_interrupt_and_an_error_are_told(page):
    page.load_workflow(workflow("script-long"))
    page.run()
    wait_for(page, "word word")
    page.comfy.interrupt()
    wait_for(page, "interrupted", key="status")

    page.load_workflow(workflow("script-picky", "something forbidden"))
    page.run()
    wait_for(page, "step 1 failed by script.", key="status")
    page.page.keyboard.press("Escape")


def test_workflow_number_one_queues_what_its_api_form_says(page):
    page.load_workflow(json.loads(WORKFLOW.read_text(encoding="utf-8")))

    queued = page.page.evaluate("async () => (await app.graphToPrompt()).output")

    wanted = json.loads((ROOT / "tests" / "prompts" / WORKFLOW.name).read_text(encoding="utf-8"))
    assert queued.keys() == wanted.keys()
    for key, node in wanted.items():
        assert node["inputs"].items() <= queued[key]["inputs"].items()


def test_another_page_sees_nothing_of_it(page):
    graph = workflow("script-slow")
    page.load_workflow(graph)
    other = page.open_tab()
    other.load_workflow(graph)

    page.run()
    wait_for(page, "first after", key="status")

    assert shown(other)["text"] == ""
    other.page.close()
