"""A hub on this machine: the few answers of the real one that a download needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"
FAULTS = {
    "gated": (403, "GatedRepo"),
    "missing": (404, "RepoNotFound"),
    "no-revision": (404, "RevisionNotFound"),
}


@dataclass
class Hub:
    """files: repository -> name -> bytes. What happens to a file's bytes can be changed while it runs."""

    files: dict[str, dict[str, bytes]]
    url: str = ""
    faults: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    pause_s: float = 0
    ranges: bool = True
    sent: list[tuple[str, int, str | None]] = field(default_factory=list)
    """(file, where it began, Authorization) of each file that was asked for."""


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self.info(found[1])
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.moved(f"/bytes/{found[1]}/{found[3]}")
            elif found := re.fullmatch(r"/bytes/([^/]+/[^/]+)/(.+)", path):
                self.body(found[1], found[2])
            else:
                self.fault(404, "EntryNotFound")

        def info(self, repo):
            if fault := hub.faults.get(repo) or ("missing" if repo not in hub.files else None):
                return self.fault(*FAULTS[fault])
            siblings = [
                {"rfilename": name, "size": len(data), **({"lfs": lfs(data)} if len(data) > 1000 else {})}
                for name, data in hub.files[repo].items()
            ]
            self.answer(json.dumps({"id": repo, "sha": SHA, "siblings": siblings}).encode())

        def fault(self, status, code):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.end_headers()

        def answer(self, data):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def moved(self, path):
            """The hub sends large files from elsewhere."""
            self.send_response(302)
            self.send_header("Location", hub.url + path)
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()

        def body(self, repo, name):
            data = hub.files[repo][name]
            start = int((re.findall(r"bytes=(\d+)-", self.headers.get("Range") or "") or [0])[0]) if hub.ranges else 0
            hub.sent.append((name, start, self.headers.get("Authorization")))
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(data) - start))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.end_headers()
            end = len(data) if hub.cut_after is None else min(len(data), start + hub.cut_after)
            for at in range(start, end, 1 << 16):
                self.wfile.write(data[at : min(at + (1 << 16), end)])
                time.sleep(hub.pause_s)

    return Handler


def lfs(data: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}


@contextmanager
def serving(files: dict[str, dict[str, bytes]]):
    hub = Hub(files=files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
