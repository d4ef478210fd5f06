"""ComfyUI's web UI in headless Chromium, in either of its two node renderers.

with open_ui(comfy, renderer="nodes2", node_types=["ResidentGenerate"]) as ui:
    ui.drop_workflow(path)
    ui.run()

Keep the block as small as the test: while it is open, nothing else in this thread can run an event loop, and a
second block inside it fails. `ui.reload()` and `ui.open_tab()` serve for more pages.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.host.comfy import ComfyUI
from tools.chromium import find_chromium

RENDERERS = ("classic", "nodes2")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
IS_READY = """(types) => window.app?.graph && window.app.extensionManager
    && types.every((type) => window.LiteGraph?.registered_node_types?.[type])
    && document.querySelector('[data-testid=queue-button]')"""
HAS_NODES = """(wanted) =>
    JSON.stringify(window.app.graph.nodes.map((node) => node.type).sort()) === JSON.stringify(wanted)"""
DROP = """([name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name, {type: 'application/json'}));
    const canvas = document.querySelector('#graph-canvas') || document.querySelector('canvas');
    const options = {bubbles: true, cancelable: true, dataTransfer: data, clientX: 700, clientY: 450};
    for (const kind of ['dragover', 'drop']) canvas.dispatchEvent(new DragEvent(kind, options));
}"""


class UI:
    """One open page. `console` holds (kind, text) of warnings and errors, `failed` (url, status or reason)."""

    def __init__(self, page: Any, url: str, node_types: Sequence[str], timeout_s: float) -> None:
        self.page = page
        self.console: list[tuple[str, str]] = []
        self.failed: list[tuple[str, Any]] = []
        self._url, self._node_types, self._timeout_ms = url, list(node_types), timeout_s * 1000
        page.on("console", lambda m: self.console.append((m.type, m.text)) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.console.append(("pageerror", str(error))))
        page.on("requestfailed", lambda request: self.failed.append((request.url, request.failure)))
        page.on(
            "response", lambda reply: self.failed.append((reply.url, reply.status)) if reply.status >= 400 else None
        )

    def open(self) -> UI:
        """Go to the server's page and wait until it can be used and knows the wanted node types."""
        self.page.goto(self._url, wait_until="domcontentloaded", timeout=self._timeout_ms)
        self.page.wait_for_function(IS_READY, arg=self._node_types, timeout=self._timeout_ms)
        return self

    def reload(self) -> UI:
        """Load the page again, as F5 does."""
        self.page.reload(wait_until="domcontentloaded", timeout=self._timeout_ms)
        self.page.wait_for_function(IS_READY, arg=self._node_types, timeout=self._timeout_ms)
        return self

    def open_tab(self) -> UI:
        """A second page of another client of the same server, in the same browser."""
        page = self.page.context.browser.new_page(viewport=self.page.viewport_size)
        return UI(page, self._url, self._node_types, self._timeout_ms / 1000).open()

    def drop_workflow(self, path: Path | str) -> None:
        """Drop a workflow file on the canvas, as a user does, and wait for its nodes."""
        text = Path(path).read_text(encoding="utf-8")
        self.page.evaluate(DROP, [Path(path).name, text])
        self._wait_for_nodes(json.loads(text))
        # The page is masked while it opens a file; a second file that comes meanwhile leaves the mask there for ever.
        self.page.wait_for_function("() => !document.querySelector('.p-blockui-mask')", timeout=self._timeout_ms)

    def load_workflow(self, workflow: dict[str, Any]) -> None:
        """Load a UI-format workflow without a file, and wait for its nodes."""
        self.page.evaluate("(workflow) => { window.app.loadGraphData(workflow) }", workflow)
        self._wait_for_nodes(workflow)

    def _wait_for_nodes(self, workflow: dict[str, Any]) -> None:
        types = sorted(node["type"] for node in workflow["nodes"])
        self.page.wait_for_function(HAS_NODES, arg=types, timeout=self._timeout_ms)

    def run(self) -> None:
        """Press Run; not by the mouse, because a toast may lie above the button."""
        self.page.locator("[data-testid=queue-button]").first.evaluate(
            "(b) => (b.querySelector('button') ?? b).click()"
        )

    def interrupt(self) -> None:
        self.page.locator("[aria-label*='ancel current run']").first.click()

    def open_sidebar(self, tooltip: str) -> None:
        """Click the sidebar tab that was registered with this tooltip; a second click closes it."""
        self.page.locator(f"[aria-label='{tooltip}']").first.click()

    def wait_for_text(self, text: str, timeout_s: float = 60) -> None:
        """Wait until the text stands anywhere on the page, also in text areas."""
        self.page.wait_for_function(
            """(text) => document.body.innerText.includes(text)
                || [...document.querySelectorAll('textarea')].some((area) => area.value.includes(text))""",
            arg=text,
            timeout=timeout_s * 1000,
        )


@contextlib.contextmanager
def open_ui(
    comfy: ComfyUI,
    *,
    renderer: str = "classic",
    node_types: Sequence[str] = (),
    size: tuple[int, int] = (1400, 900),
    timeout_s: float = 90,
) -> Iterator[UI]:
    """The server's page in a fresh browser.

    renderer:   "classic" (LiteGraph) or "nodes2" (Vue)
    node_types: node types that must be registered before the page counts as ready
    """
    from playwright.sync_api import sync_playwright

    comfy.use_settings({"Comfy.VueNodes.Enabled": RENDERERS.index(renderer) == 1})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]})
            yield UI(page, comfy.url, node_types, timeout_s).open()
        finally:
            browser.close()
