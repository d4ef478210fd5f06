"""Run one API-format prompt on a ComfyUI server and collect all that it sends back.

Needs aiohttp, which ComfyUI has, once a prompt is run. The socket lives in a thread of its own, so that callers may be
synchronous, even below another event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import struct
import threading
import time
import urllib.error
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.comfyui import ComfyUI
from tools.fault import Fault

ENDS = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}
PROGRESS_TEXT = 3
"""Kind of the binary message that carries progress text of a node; the others carry preview images."""
QUIET_S = 10.0
"""After so long without an event the server is asked whether the prompt has ended."""


@dataclass(frozen=True)
class Event:
    """One message of the server. Progress text comes as type "progress_text" with `node` and `text`."""

    type: str
    data: dict[str, Any]


@dataclass
class PromptRun:
    """What became of a prompt.

    status:  "success", "error", "interrupted", or "rejected" by the validation
    outputs: node id -> what the node gave the UI
    texts:   node id -> its progress texts, in order
    cached:  ids of the nodes that did not run because nothing had changed
    error:   the execution_error data, or the body of the rejection
    """

    prompt_id: str = ""
    status: str = ""
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    cached: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """The data of the events of one type."""
        return [event.data for event in self.events if event.type == kind]

    def streamed(self, node: str, index: int = 0, channel: str = "answer") -> str:
        """The text that reached the browser live, put together from its deltas and snapshots."""
        text = ""
        for data in self.of_type("resident.stream"):
            if str(data["node"]) == node and data["index"] == index and data["channel"] == channel:
                text = data["delta"] if data.get("is_snapshot") else text + data["delta"]
        return text

    def ran(self) -> list[str]:
        """Ids of the nodes that were executed, in order."""
        return [data["node"] for data in self.of_type("executing") if data["node"] is not None]

    def take(self, event: Event) -> None:
        self.events.append(event)
        data = event.data
        if event.type == "progress_text":
            self.texts.setdefault(data["node"], []).append(data["text"])
        elif event.type == "executed" and data.get("output"):
            self.outputs[data["node"]] = data["output"]
        elif event.type == "execution_cached":
            self.cached = list(data["nodes"])
        elif event.type in ENDS:
            self.status = ENDS[event.type]
            self.error = data if self.status == "error" else None


def parse_binary(message: bytes) -> Event:
    """A binary message as an event: progress text, or the bare kind of a preview."""
    (kind,) = struct.unpack_from(">I", message)
    if kind != PROGRESS_TEXT:
        return Event("binary", {"kind": kind, "num_bytes": len(message) - 4})
    (length,) = struct.unpack_from(">I", message, 4)
    node = message[8 : 8 + length].decode()
    return Event("progress_text", {"node": node, "text": message[8 + length :].decode()})


class EventSocket:
    """The websocket of one client: iterate `events` for what arrives."""

    def __init__(self, url: str, client_id: str) -> None:
        self._url = f"{url}/ws?clientId={client_id}".replace("http", "ws", 1)
        self._arrived: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._is_open = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> EventSocket:
        self._thread.start()
        if not self._is_open.wait(30):
            raise Fault(f"No websocket at {self._url} within 30 s. Is the server running?")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, None if none came in time; raises what broke the socket."""
        try:
            got = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(got, BaseException):
            raise got
        return got

    def _run(self) -> None:
        self._task = self._loop.create_task(self._listen())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._arrived.put(error)
        finally:
            self._is_open.set()
            self._loop.close()

    async def _listen(self) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as session, session.ws_connect(self._url, max_msg_size=0) as socket:
            self._is_open.set()
            async for message in socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    parsed = json.loads(message.data)
                    self._arrived.put(Event(parsed["type"], parsed.get("data") or {}))
                elif message.type == aiohttp.WSMsgType.BINARY:
                    self._arrived.put(parse_binary(message.data))
        raise Fault("The server closed the websocket. Look at its log.")


def run_prompt(
    server: ComfyUI,
    prompt: Mapping[str, Any],
    *,
    client_id: str | None = "",
    on_event: Callable[[Event], None] | None = None,
    extra_data: Mapping[str, Any] | None = None,
    timeout_s: float = 300.0,
) -> PromptRun:
    """Queue a prompt and follow it to its end.

    client_id: who owns the run; "" makes one up, None queues without one
    on_event:  sees each event as it comes, for printing or for an interrupt at a chosen moment
    """
    if client_id == "":
        client_id = uuid.uuid4().hex
    body: dict[str, Any] = {"prompt": prompt}
    if client_id is not None:
        body["client_id"] = client_id
    if extra_data:
        body["extra_data"] = dict(extra_data)
    run = PromptRun()
    with EventSocket(server.url, client_id or uuid.uuid4().hex) as socket:
        try:
            run.prompt_id = server.post("/prompt", body)["prompt_id"]
        except urllib.error.HTTPError as refusal:
            run.status, run.error = "rejected", json.loads(refusal.read())
            return run
        for event in _until_end(server, socket, run, timeout_s):
            run.take(event)
            if on_event:
                on_event(event)
    _fill_from_history(server, run)
    return run


def _until_end(server: ComfyUI, socket: EventSocket, run: PromptRun, timeout_s: float) -> Iterator[Event]:
    """The events of this prompt, up to the one that says that nothing runs any more.

    The history knows of the end before the last events have left a busy server, so it counts only after a while
    without any.
    """
    give_up_at = time.monotonic() + timeout_s
    heard_at = time.monotonic()
    while time.monotonic() < give_up_at:
        event = socket.receive(1.0)
        if event is None:
            if not server.is_running() and server.process is not None:
                raise Fault(f"ComfyUI ended while a prompt ran:\n{server.log_tail()}")
            if time.monotonic() - heard_at > QUIET_S and run.prompt_id in server.get(f"/history/{run.prompt_id}"):
                return
            continue
        heard_at = time.monotonic()
        if event.data.get("prompt_id", run.prompt_id) != run.prompt_id:
            continue
        yield event
        if event.type == "executing" and event.data.get("node") is None:
            return
    raise Fault(f"The prompt did not end within {timeout_s:.0f} s. The server's log ends with:\n{server.log_tail()}")


def _fill_from_history(server: ComfyUI, run: PromptRun) -> None:
    """Complete a run whose events went to nobody, or whose end arrived in an unusual order."""
    entry = server.get(f"/history/{run.prompt_id}").get(run.prompt_id)
    if entry is None:
        return
    run.outputs = {**entry["outputs"], **run.outputs}
    if not run.status:
        for kind, data in entry["status"]["messages"]:
            if kind in ENDS:
                run.take(Event(kind, data))
