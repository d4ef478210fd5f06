"""The monitor's panel in the real page, in both node renderers."""

import json

import pytest

from tests.host.browser import RENDERERS, open_ui
from tests.nodes.conftest import free
from tests.nodes.test_browser import workflow
from tests.nodes.test_monitor_server import monitor

pytestmark = pytest.mark.browser

QUIET_S = 15
PART = """(name) => [...document.querySelectorAll(`.resident-monitor ${name}`)].map((one) => one.textContent)"""
BYTES = """() => Object.fromEntries([...document.querySelectorAll('.rm-legend [data-part]')]
    .map((one) => [one.dataset.part, +one.dataset.bytes]))"""
TAB_PARTS = """() => {
    const name = 'resident-llm-monitor-tab-button';
    const tab = document.querySelector(`.${name}, [data-testid=${name}]`);
    const found = {
        icon: tab.querySelector('.side-bar-button-icon'),
        badge: tab.querySelector('.p-badge, .sidebar-icon-badge'),
        label: tab.querySelector('.side-bar-button-label'),
    };
    const parts = {text: tab.textContent.trim(), tab: tab.getBoundingClientRect().toJSON()};
    for (const [name, part] of Object.entries(found)) {
        if (!part) continue;
        const range = document.createRange();
        name === 'icon' ? range.selectNode(part) : range.selectNodeContents(part);
        parts[name] = range.getBoundingClientRect().toJSON();
    }
    return parts;
}"""
"""Where the tab's icon and its texts are, the texts without what is around them."""
WIDTH = "() => document.querySelector(\".rm-bar [data-part='weights']\").style.width"
CURVE = "() => document.querySelector('.rm-rate-curve polyline').getAttribute('points')"


@pytest.fixture(scope="module", params=RENDERERS)
def page(request, comfy_with, script_models):
    """One open page per renderer, with what goes over its wires."""
    comfy = comfy_with(models=script_models, env={"RESIDENT_LLM_SCRIPTED": "1"})
    with open_ui(comfy, renderer=request.param, node_types=["ResidentGenerate"]) as ui:
        ui.comfy, ui.renderer, ui.requests, ui.messages = comfy, request.param, [], []
        ui.page.on("request", lambda one: ui.requests.append(one.url) if "/resident/" in one.url else None)
        ui.page.on("websocket", lambda one: one.on("framereceived", lambda data: ui.messages.append(str(data))))
        ui.reload()  # the socket that is watched is the one opened now
        ui.open_sidebar("LLM Monitor")
        yield ui


def parts(ui, name):
    return ui.page.evaluate(PART, name)


def wait_for(ui, name, what):
    ui.page.wait_for_function(
        f"([name, what]) => ({PART})(name).some((text) => text.includes(what))", arg=[name, what], timeout=30_000
    )


def test_the_panel_follows_a_run_and_its_numbers_are_the_ledgers(page):
    page.comfy.run_prompt({"1": free()})
    page.load_workflow(workflow("script-heavy"))

    page.run()
    wait_for(page, ".rm-live", "decoding")
    page.page.wait_for_function(f"() => ({CURVE})().split(' ').length > 2", timeout=30_000)
    early = page.page.evaluate(CURVE)
    page.page.wait_for_function(f"(early) => ({CURVE})() !== early", arg=early, timeout=30_000)
    wait_for(page, ".rm-live", "idle")

    state = monitor(page.comfy)
    [device], [model] = state["devices"], state["models"]
    shown = page.page.evaluate(BYTES)
    assert (shown["weights"], shown["kv_cache"]) == (device["parts"]["weights"], device["parts"]["kv_cache"])
    assert shown["weights"] + shown["others"] + shown["free"] == device["total_bytes"]
    assert float(page.page.evaluate(WIDTH).rstrip("%")) > 0.1
    assert "script-heavy" in parts(page, ".rm-model")[0]
    assert f"{model['context_used']}" in parts(page, ".rm-model")[0].replace("\u202f", "")
    assert "%" in page.page.evaluate(TAB_PARTS)["text"]


def test_the_share_stands_above_the_icon_or_in_the_label_and_all_of_it_is_seen(page):
    seen = {}
    for size in ("normal", "small"):
        page.page.evaluate("(size) => app.extensionManager.setting.set('Comfy.Sidebar.Size', size)", size)
        page.open_sidebar("LLM Monitor")  # asks the server when it opens
        page.open_sidebar("LLM Monitor")
        page.page.wait_for_timeout(500)
        seen[size] = page.page.evaluate(TAB_PARTS)

    normal, small = seen["normal"], seen["small"]
    assert "badge" not in normal and normal["text"].startswith("LLM ") and normal["text"].endswith("%")
    assert small["text"].endswith("%") and "label" not in small
    assert small["badge"]["bottom"] <= small["icon"]["top"] + 1
    for part in (normal["label"], normal["icon"], small["badge"], small["icon"]):
        around = normal["tab"] if part in normal.values() else small["tab"]
        assert around["left"] <= part["left"] and part["right"] <= around["right"]
        assert around["top"] <= part["top"] and part["bottom"] <= around["bottom"]


def test_a_click_on_a_run_shows_its_report(page):
    newest = page.page.locator(".rm-history details").first
    newest.locator("summary").click()

    report = json.loads(newest.locator("pre").text_content())

    assert report["model"] == "script-heavy"
    assert report["num_output_tokens"] == monitor(page.comfy)["runs"][-1]["num_tokens"]
    assert "raw_text" not in report


def test_free_unloads_and_says_so(page):
    page.page.locator(".rm-free").first.click()

    wait_for(page, ".rm-dim", "script-heavy is unloaded")
    wait_for(page, ".rm-dim", "No model is loaded.")
    assert monitor(page.comfy)["models"] == []


def test_nothing_is_asked_and_nothing_is_sent_while_nothing_runs(page):
    page.page.wait_for_timeout(1000)
    page.requests.clear()
    page.messages.clear()

    page.page.wait_for_timeout(QUIET_S * 1000)

    assert page.requests == []
    assert [one for one in page.messages if "resident" in one] == []


def test_a_reload_brings_the_panel_its_runs_and_its_curves_back(page):
    curve = "() => document.querySelector('.rm-memory-curve polyline').getAttribute('points').split(' ').length"
    before = page.page.evaluate(curve)

    page.reload()
    if not page.page.locator(".resident-monitor").count():
        page.open_sidebar("LLM Monitor")
    wait_for(page, ".rm-history", "script-heavy")

    assert page.page.evaluate(curve) >= before > 3
    assert [text for _, text in page.console if "resident-llm/" in text] == []


def test_a_closed_panel_asks_once_after_a_run(page):
    page.open_sidebar("LLM Monitor")
    page.page.wait_for_selector(".resident-monitor", state="detached")
    page.requests.clear()
    page.load_workflow(workflow("script-slow"))

    page.run()
    page.page.wait_for_function(
        """() => app.graph.getNodeById(4).widgets.find((widget) => widget.name === 'stream').element.textContent
            .includes('first after')""",
        timeout=30_000,
    )
    page.page.wait_for_timeout(1500)

    assert 1 <= len(page.requests) <= 2
    page.open_sidebar("LLM Monitor")
    wait_for(page, ".rm-history", "script-slow")


def test_the_curves_go_on_where_the_servers_clock_was_set_back(page):
    samples = page.page.evaluate(
        """async () => {
            const [file] = (await (await fetch('/extensions')).json()).filter((one) => one.endsWith('/resident.js'));
            const { MonitorData } = await import(file.replace('resident.js', 'monitor.mjs'));
            const data = new MonitorData();
            for (const at of [1000, 1001, 401, 402]) {
                const since = Number(new URLSearchParams(data.query).get('since'));
                const samples = [{ at, tokens_per_s: null, used: {} }].filter((one) => one.at > since);
                data.take({ monitor: 'm', at, samples, runs: [] });
            }
            return data.samples.map((one) => one.at);
        }"""
    )

    assert samples == [402]
