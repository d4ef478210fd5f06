"""The workflows in the newest page that can be had, which knows nodes and widgets in its own way."""

from __future__ import annotations

import random

import pytest

from tests.host.browser import RENDERERS, open_ui
from tests.tiny.checkpoint import write_checkpoint
from tests.workflows.files import FILES, FOLDER, quick_file, read
from tests.workflows.page import OUR_NODES, SETTINGS, check_opened, run_and_wait
from tools.fault import Fault
from tools.frontend import frontend

pytestmark = pytest.mark.browser


@pytest.mark.slow
@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_newest_page_opens_them_too(comfy_with, renderer):
    try:
        root = frontend()
    except Fault as fault:
        pytest.skip(str(fault))
    comfy = comfy_with("--front-end-root", str(root))
    write_checkpoint(comfy.base / "models" / "checkpoints")
    comfy.use_settings(SETTINGS)
    info = comfy.get("/object_info")

    with open_ui(comfy, renderer=renderer, node_types=OUR_NODES) as ui:
        for path in FILES:
            check_opened(ui, info, path)
        seed = {"seed": random.SystemRandom().randrange(2**40)}
        ui.load_workflow(quick_file(read(FOLDER / "01-prompt-expansion.json"), info, ResidentGenerate=seed))
        run_and_wait(ui, "ResidentGenerate", "6 tokens")
