"""A server on loopback that sends exactly the bytes that a test says, and sees when its peer goes away."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MODELS = {"object": "list", "data": [{"id": "tiny", "owned_by": "scripted", "max_model_len": 64}]}


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: object


Act = Callable[["Connection", Seen], None]


class Connection:
    """The server's end of one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.send(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n{extra}\r\n".encode())

    def wait_for_close(self, timeout_s: float = 10.0) -> bool:
        """Whether the peer closed its end within the time."""
        self._sock.settimeout(timeout_s)
        try:
            return self._sock.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True


def reply(body: object, status: int = 200, kind: str = "application/json", **headers: str) -> Act:
    """Send a whole reply."""

    def act(connection: Connection, seen: Seen) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.head(status, kind, Content_Length=str(len(data)), **headers)
        connection.send(data)

    return act


def stream(*pieces: bytes, pause_s: float = 0.0) -> Act:
    """Send a stream of these pieces, then close."""

    def act(connection: Connection, seen: Seen) -> None:
        connection.head()
        for piece in pieces:
            connection.send(piece)
            time.sleep(pause_s)

    return act


def event(**body: object) -> bytes:
    """One event as bytes."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(text: str, finish_reason: str | None = None, **fields: object) -> bytes:
    """One chunk of a chat reply."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason, **fields}
    return event(choices=[choice])


DONE = b"data: [DONE]\n\n"


@dataclass
class ScriptedServer:
    """Serve `routes` (path -> act) until closed; every request is kept in `seen`."""

    routes: dict[str, Act] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    def __post_init__(self) -> None:
        self.routes.setdefault("/v1/models", reply(MODELS))
        outer, lock = self, threading.Lock()

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                line = self.rfile.readline().decode().split()
                if len(line) < 2:
                    return
                headers = {}
                while text := self.rfile.readline().decode().strip():
                    name, _, value = text.partition(":")
                    headers[name.lower()] = value.strip()
                data = self.rfile.read(int(headers.get("content-length", 0)))
                seen = Seen(line[0], line[1], headers, json.loads(data) if data else None)
                path = line[1].partition("?")[0]
                with lock:
                    outer.seen.append(seen)
                    if path != "/v1/models":
                        outer.num_open += 1
                        outer.max_open = max(outer.max_open, outer.num_open)
                try:
                    act = outer.routes.get(path, reply({"detail": "Not Found"}, 404))
                    act(Connection(self.connection), seen)
                except OSError:
                    pass
                finally:
                    with lock:
                        outer.num_open -= path != "/v1/models"

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, path: str) -> list[object]:
        return [one.body for one in self.seen if one.path == path]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
