"""Every workflow in the real page, in both node renderers: nothing missing, no value shifted, no node over another.

One page per renderer loads all files in turn.
"""

from __future__ import annotations

import random

import pytest

from tests.host.browser import RENDERERS, open_ui
from tests.tiny.checkpoint import write_checkpoint
from tests.workflows.files import FILES, FOLDER, NAMES, quick_file, read
from tests.workflows.page import OUR_NODES, SETTINGS, SHOWN, check_opened, run_and_wait

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", params=RENDERERS)
def page(request, comfy_with):
    comfy = comfy_with()
    write_checkpoint(comfy.base / "models" / "checkpoints")
    comfy.use_settings(SETTINGS)
    with open_ui(comfy, renderer=request.param, node_types=OUR_NODES) as ui:
        ui.comfy, ui.info = comfy, comfy.get("/object_info")
        yield ui


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_it_opens_with_all_nodes_and_values_in_their_places(page, path):
    check_opened(page, page.info, path)


EDITED = """() => Object.fromEntries(app.graph.nodes.find((node) => node.type === 'ResidentReview').widgets
    .filter((widget) => ['edited', 'edit_of'].includes(widget.name)).map((widget) => [widget.name, widget.value]))"""
OPEN_IMAGE = """async (path) => {
    const picture = await (await fetch(path)).blob();
    await app.handleFile(new File([picture], 'picture.png', {type: 'image/png'}));
}"""

NOTICE = """async (text) => {
    const { api } = await import('/scripts/api.js');
    api.dispatchEvent(new CustomEvent('resident.notice', {detail: {text}}));
}"""


def newest_image(comfy):
    """The path of the last saved image that carries a workflow."""
    names = sorted((comfy.base / "output" / "resident").glob("prompt_*.png"))
    return f"/view?type=output&subfolder=resident&filename={names[-1].name}"


def test_a_text_is_reviewed_and_changed_and_an_image_brings_it_back(page):
    seed = {"seed": random.SystemRandom().randrange(2**40)}
    workflow = quick_file(read(FOLDER / "02-prompt-to-image.json"), page.info, ResidentGenerate=seed)
    page.load_workflow(workflow)

    run_and_wait(page, "ResidentReview", "passed on as it came")
    page.page.evaluate(
        """() => app.graph.nodes.find((node) => node.type === 'ResidentReview').widgets
            .find((widget) => widget.name === 'review').element.querySelector('button').click()"""
    )
    begun = page.page.evaluate(EDITED)
    assert begun["edited"] and begun["edited"] in page.page.evaluate(SHOWN, "ResidentGenerate")
    assert len(begun["edit_of"]) == 12

    page.page.evaluate(
        """() => { app.graph.nodes.find((node) => node.type === 'ResidentReview').widgets
            .find((widget) => widget.name === 'edited').value = 'a blue fox'; }"""
    )
    run_and_wait(page, "ResidentReview", "passed on as edited")

    page.page.wait_for_timeout(3000)  # until the image of the edited text is saved
    page.page.evaluate("() => sessionStorage.clear()")
    page.reload()
    page.page.evaluate(OPEN_IMAGE, newest_image(page.comfy))
    page.page.wait_for_function(
        f"() => ({SHOWN})('ResidentGenerate').includes(\"from the image's workflow\")", timeout=30_000
    )

    assert begun["edited"] in page.page.evaluate(SHOWN, "ResidentGenerate")
    assert "resident_text" not in page.page.evaluate("() => JSON.stringify(app.graph.serialize())")


def test_a_notice_of_the_server_becomes_a_toast(page):
    page.page.evaluate(NOTICE, "tiny is back on cuda:0: 1 GB.")

    page.wait_for_text("tiny is back on cuda:0: 1 GB.", timeout_s=10)
