"""The workflows in the newest page that can be had, which knows nodes and widgets in its own way."""

from __future__ import annotations

import random

import pytest

from tests.host.browser import RENDERERS, open_ui
from tests.tiny.checkpoint import write_checkpoint
from tests.workflows.files import FILES, FOLDER, quick_file, read
from tests.workflows.page import OUR_NODES, SETTINGS, check_opened, run_and_wait

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ROWS = """(type) => {
    const node = app.graph.nodes.find((node) => node.type === type);
    const shown = document.querySelector(`[data-node-id="${node.id}"]`).innerText;
    return node.widgets.map((widget) => widget.name).filter((name) => shown.includes(name));
}"""


@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_newest_page_opens_them_too(newest_comfy, renderer):
    write_checkpoint(newest_comfy.base / "models" / "checkpoints")
    newest_comfy.use_settings(SETTINGS)
    info = newest_comfy.get("/object_info")

    with open_ui(newest_comfy, renderer=renderer, node_types=OUR_NODES) as ui:
        for path in FILES:
            check_opened(ui, info, path)
        seed = {"seed": random.SystemRandom().randrange(2**40)}
        ui.load_workflow(quick_file(read(FOLDER / "01-prompt-expansion.json"), info, ResidentGenerate=seed))
        run_and_wait(ui, "ResidentGenerate", "6 tokens")


def test_nodes_2_folds_settings_that_few_need_by_itself(newest_comfy):
    with open_ui(newest_comfy, renderer="nodes2", node_types=OUR_NODES) as page:
        page.load_workflow(read(FOLDER / "01-prompt-expansion.json"))
        page.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        page.page.wait_for_timeout(1000)

        rows = set(page.page.evaluate(ROWS, "ResidentLoadLLM"))

        assert {"model", "engine", "context_len", "when_idle"} <= rows
        assert rows & {"device", "dtype", "attention", "kv_cache", "host_copy_gb", "sums"} == set()
