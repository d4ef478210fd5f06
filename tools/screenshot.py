"""Make README's pictures: open workflow number one in a real ComfyUI, run it with the real model, save the page.

python -m tools.screenshot [first-light|monitor] [--renderer classic|nodes2] [--out docs/img/first-light.png]

first-light is the page once the text is there; monitor has the sidebar's panel open in the middle of a second run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.host.browser import RENDERERS, open_ui
from tests.host.comfy import ComfyUI
from tools.comfyui import ROOT
from tools.fault import Fault
from tools.model import MODELS, NAME

WORKFLOW = ROOT / "workflows" / "01-prompt-expansion.json"
QUIET = {"Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}
MAX_BYTES = 300_000
STATUS = """() => app.graph.nodes.find((node) => node.comfyClass === 'ResidentGenerate').widgets
    .find((widget) => widget.name === 'stream').element.querySelector('.resident-stream-status').textContent"""

ANOTHER_RUN = """() => {
    const widgets = app.graph.nodes.find((node) => node.comfyClass === 'ResidentGenerate').widgets;
    widgets.find((widget) => widget.name === 'seed').value += 1;
    widgets.find((widget) => widget.name === 'max_tokens').value = 400;
}"""
NUM_POINTS = """() => document.querySelector('.rm-rate-curve polyline').getAttribute('points').split(' ')
    .filter((point) => !point.endsWith(',33.0')).length"""
PICTURES = ("first-light", "monitor")


def take(what: str, model: Path, out: Path, renderer: str) -> None:
    """Save the page as a PNG at its moment; raises Fault if the picture is too large for a README."""
    with (
        tempfile.TemporaryDirectory() as base,
        ComfyUI(base, models=[model], settings=QUIET) as comfy,
        open_ui(comfy, renderer=renderer, node_types=["ResidentGenerate"], size=(1440, 810)) as ui,
    ):
        ui.drop_workflow(WORKFLOW)
        if (banner := ui.page.locator("button:has-text('Try it out')")).count():
            banner.first.locator("xpath=following::button[1]").click()
        if what == "monitor":
            ui.open_sidebar("LLM Monitor")
            ui.page.wait_for_selector(".resident-monitor .rm-device")
        ui.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        ui.run()
        ui.page.wait_for_function(f"() => ({STATUS})().includes('first after')", timeout=300_000)
        ui.page.wait_for_timeout(1500)
        if what == "monitor":
            num_before = ui.page.evaluate(NUM_POINTS)
            ui.page.evaluate(ANOTHER_RUN)
            ui.run()
            ui.page.wait_for_function(f"(before) => ({NUM_POINTS})() > before + 6", arg=num_before, timeout=300_000)
        out.parent.mkdir(parents=True, exist_ok=True)
        ui.page.screenshot(path=out)
    if out.stat().st_size > MAX_BYTES:
        raise Fault(f"{out} has {out.stat().st_size} bytes; README's pictures have at most {MAX_BYTES}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=PICTURES, default=PICTURES[0])
    parser.add_argument("--renderer", choices=RENDERERS, default="classic")
    parser.add_argument("--out", type=Path, help="docs/img/first-light.png or docs/img/monitor.png if not given")
    parser.add_argument("--model", type=Path, default=MODELS / NAME, help="a folder of SmolLM2-135M-Instruct")
    args = parser.parse_args()
    out = args.out or ROOT / "docs" / "img" / f"{args.what}.png"
    try:
        take(args.what, args.model, out, args.renderer)
    except Fault as fault:
        print(fault, file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
