"""Make the pictures of the bundled workflows: open each in a real ComfyUI, save the page and a small thumbnail.

python -m tools.workflow_pictures [NAME ...]
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from tests.host.browser import open_ui
from tests.host.comfy import ComfyUI
from tools.comfyui import ROOT
from tools.fault import Fault, told
from tools.screenshot import QUIET

FOLDER, PICTURES = ROOT / "workflows", ROOT / "docs" / "img" / "workflows"
SIZE, THUMBNAIL = (1600, 900), (480, 270)
MAX_PICTURE_BYTES, MAX_THUMBNAIL_BYTES = 120_000, 60_000
SETTINGS = {
    **QUIET,
    "Comfy.Workflow.ShowMissingModelsWarning": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
    "LiteGraph.Canvas.LowQualityRenderingZoomThreshold": 0.1,
}
FIT = """() => {
    const nodes = app.graph.nodes, groups = app.graph._groups ?? [];
    const boxes = [...nodes.map((n) => [n.pos[0], n.pos[1] - 30, n.pos[0] + n.size[0], n.pos[1] + n.size[1]]),
        ...groups.map((g) => [g.pos[0], g.pos[1], g.pos[0] + g.size[0], g.pos[1] + g.size[1]])];
    const [left, top] = [0, 1].map((i) => Math.min(...boxes.map((box) => box[i])));
    const [right, bottom] = [2, 3].map((i) => Math.max(...boxes.map((box) => box[i])));
    const ds = app.canvas.ds;
    ds.scale = Math.min((innerWidth - 120) / (right - left), (innerHeight - 190) / (bottom - top), 1);
    ds.offset = [90 / ds.scale - left, 110 / ds.scale - top];
    app.canvas.setDirty(true, true);
    return [78, 98, 102 + (right - left) * ds.scale, 122 + (bottom - top) * ds.scale].map(Math.round);
}"""
"""Show the whole graph below the page's bars; the box that it takes in the picture."""


def save(shot: bytes, box: tuple[int, int, int, int], name: str) -> None:
    """Write the picture and the thumbnail as JPEG, as sharp as their limits allow."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(shot)) as page:
        graph = page.convert("RGB").crop(box)
        small = ImageOps.pad(graph, THUMBNAIL, Image.Resampling.LANCZOS, color="#141414")
        _jpeg(graph, PICTURES / f"{name}.jpg", MAX_PICTURE_BYTES)
        _jpeg(small, FOLDER / f"{name}.jpg", MAX_THUMBNAIL_BYTES)


def _jpeg(picture: object, path: Path, max_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for quality in (88, 80, 70, 60, 45):
        picture.save(path, "JPEG", quality=quality, optimize=True)  # type: ignore[attr-defined]
        if path.stat().st_size < max_bytes:
            return
    raise Fault(f"{path} has {path.stat().st_size} bytes; at most {max_bytes} are allowed.")


def main() -> int:
    files = [path for path in sorted(FOLDER.glob("*.json")) if not sys.argv[1:] or path.stem in sys.argv[1:]]
    with (
        tempfile.TemporaryDirectory() as base,
        ComfyUI(base, settings=SETTINGS) as comfy,
        open_ui(comfy, node_types=["ResidentGenerate"], size=SIZE) as ui,
    ):
        if (banner := ui.page.locator("button:has-text('Try it out')")).count():
            banner.first.locator("xpath=following::button[1]").click()
        for path in files:
            ui.drop_workflow(path)
            ui.page.mouse.move(SIZE[0] - 400, SIZE[1] - 20)
            box = ui.page.evaluate(FIT)
            ui.page.wait_for_timeout(900)
            save(ui.page.screenshot(), box, path.stem)
            print(f"wrote {PICTURES / path.stem}.jpg")
    return 0


if __name__ == "__main__":
    sys.exit(told(main))
