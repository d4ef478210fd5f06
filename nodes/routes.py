"""The monitor's HTTP routes: one that reads, two that act on a model of our own listing, guarded.

Nothing in ComfyUI authenticates, and any page in the user's browser can send requests to it. So what acts takes only
JSON by its content type, which no foreign page may send unasked, and only from a page of this server.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..runtime import ModelSpec
from ..runtime.journal import short_name
from ..runtime.telemetry import format_bytes
from . import host

if TYPE_CHECKING:
    from aiohttp.web import Request, Response

PREFIX = "/resident/v1"
MAX_BODY_BYTES = 4096


class Refused(Exception):
    """An answer other than 200: its status, and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def register() -> None:
    """Serve the routes; doing it again changes nothing."""
    host.add_route("GET", f"{PREFIX}/monitor", read)
    host.add_route("POST", f"{PREFIX}/free", free)
    host.add_route("POST", f"{PREFIX}/keep", keep)


async def read(request: Request) -> Response:
    """The state. `since` (seconds since 1970) and `after` (a run's number) leave out what the page has already."""
    try:
        since, after = float(request.query.get("since", 0)), int(request.query.get("after", 0))
    except ValueError:
        return _answer(400, {"error": "since is a number of seconds, after the number of a run."})
    monitor = host.monitor()
    state = await _in_thread(lambda: monitor.read(since=since, after=after))
    return _answer(200, state)


async def free(request: Request) -> Response:
    """Unload one model: {"id": ...}. Refused while it is in use."""
    try:
        spec, _ = await _asked(request)
        sentence = await _in_thread(lambda: _unload(spec))
    except Refused as refused:
        return _answer(refused.status, {"error": str(refused)})
    return _answer(200, {"done": sentence})


async def keep(request: Request) -> Response:
    """Have one model stay after its run, or leave as its loader says: {"id": ..., "keep": true}."""
    try:
        spec, body = await _asked(request)
        if not isinstance(body.get("keep"), bool):
            raise Refused(400, "keep is missing; it is true or false.")
    except Refused as refused:
        return _answer(refused.status, {"error": str(refused)})
    host.keep(spec, body["keep"])
    host.monitor().forget()
    stays = "stays after its run" if body["keep"] else "leaves as its loader says"
    return _answer(200, {"done": f"{short_name(spec.model)} {stays}."})


async def _asked(request: Request) -> tuple[ModelSpec, dict[str, Any]]:
    """The model and the body of a request that may act; raises Refused."""
    if request.content_type != "application/json":
        raise Refused(415, "Send JSON, with content type application/json.")
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    if site == "cross-site" or _is_foreign(request.headers.get("Origin"), request.headers.get("Host", "")):
        raise Refused(403, "Only a page of this server may do this.")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise Refused(413, f"The body is over {MAX_BODY_BYTES} bytes.")
    data = b""
    async for part in request.content.iter_any():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise Refused(413, f"The body is over {MAX_BODY_BYTES} bytes.")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "The body is no JSON.") from None
    if not isinstance(body, dict) or not isinstance(body.get("id"), str):
        raise Refused(400, "id is missing; it is one that the monitor lists.")
    spec = host.monitor().find(body["id"])
    if spec is None:
        raise Refused(404, "No loaded model has this id. It may have left already.")
    return spec, body


def _is_foreign(origin: str | None, own: str) -> bool:
    """Whether a page of another server asks; one whose origin cannot be read is none of ours."""
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != own.lower()
    except ValueError:
        return True


def _unload(spec: ModelSpec) -> str:
    """Unload a model that nobody uses; a sentence about it."""
    runtime, name = host.runtime(), short_name(spec.model)
    one = next(iter(runtime.residents(spec)), None)
    if one is not None and one.is_busy:
        raise Refused(409, f"{name} is in use. Free it when its run is over, or cancel the run.")
    freed = runtime.unload(spec)
    host.monitor().forget()
    if runtime.residents(spec):
        raise Refused(409, f"{name} came into use. Free it when its run is over.")
    return f"{name} is unloaded, {format_bytes(freed)} freed."


async def _in_thread(act: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, act)


def _answer(status: int, body: object) -> Response:
    from aiohttp import web

    return web.json_response(body, status=status, headers={"Cache-Control": "no-store"})
