"""HTTP to one server: exact time-outs, sockets that close at once, no redirects, no proxy unless asked for.

aiohttp, because every ComfyUI brings it (its own server is built on it), so this engine needs no package; it gives a
stream's bytes as they come and closes a socket in the middle of it. Its event loop lives in one private thread that
belongs to this object, since ComfyUI makes and ends a loop of its own for each graph run. One request is one
connection: closing it is how a server learns that nobody listens, and a stale pooled one cannot swallow a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from ...errors import ResidentError, ServerError
from ...profiles import Profile
from .wire import ServerEvent, SseDecoder, error_of

# Not wait_for: before Python 3.12 it loses a cancellation that comes together with the result.
if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout  # aiohttp brings it where asyncio has none

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BODY_BYTES = 4_000_000
"""Most bytes of a reply that is no stream."""

ASK_S = 10.0
"""Patience for a small question (models, metrics, health)."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole reply; `body` is its JSON, or None where it is none."""

    status: int
    text: str
    body: Any
    content_type: str
    retry_after_s: float | None

    @property
    def is_ok(self) -> bool:
        return self.status == 200


class Busy(ServerError):
    """The server takes no more at the moment (503 or 429); nothing was generated, so asking again is safe.

    retry_after_s: what the server asked for, None if it did not say
    """

    retry_after_s: float | None = None


class Unreachable(ServerError):
    """No connection came about; nothing was sent, so asking again is safe."""


class LoopThread:
    """An event loop in a thread of its own; what runs in it is driven from any other thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="resident-llm-http", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs in the loop; raises ServerError if the loop is closed by then."""
        with self._lock:  # what is handed over before the loop closes is cancelled by it, and never waited for in vain
            future = None if self._is_closed else asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            if future is not None:
                return future.result()
        except CancelledError:
            pass
        coroutine.close()
        raise ServerError("The connection to the server is closed. Run the graph again.")

    def call_soon(self, act: Callable[[], object]) -> None:
        """Call something in the loop; nothing once it is closed."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Cancel what still runs and end the thread. Calling it again does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class Http:
    """A connection to one profile's server, in a loop that it shares with others. `close` closes its sockets."""

    def __init__(self, profile: Profile, loop: LoopThread) -> None:
        self.profile = profile
        self._key = profile.resolve_key()
        self._loop = loop
        self._session = loop.run(self._open())

    def is_by(self, profile: Profile) -> bool:
        """Whether the profile, with the key as it is now, is the one that this connection was made from."""
        return profile == self.profile and profile.resolve_key() == self._key

    async def _open(self) -> aiohttp.ClientSession:
        headers = dict(self.profile.headers)
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            trust_env=self.profile.proxy_from_env,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.profile.connect_s),
        )

    def get(self, path: str, *, timeout_s: float = ASK_S) -> Reply:
        """GET a whole reply, whatever its status; raises ServerError if there is none."""
        return self._loop.run(self._ask("GET", path, None, timeout_s))

    def post(self, path: str, body: object, *, timeout_s: float = ASK_S) -> Reply:
        """POST JSON and take a whole reply, whatever its status; raises ServerError if there is none."""
        return self._loop.run(self._ask("POST", path, body, timeout_s))

    async def ask(self, path: str, *, timeout_s: float = ASK_S) -> Reply:
        """`get`, for coroutines in the loop."""
        return await self._ask("GET", path, None, timeout_s)

    async def _ask(self, method: str, path: str, body: object, timeout_s: float) -> Reply:
        with self.translate_errors():
            try:
                async with timeout(timeout_s):
                    response = await self._send(method, path, body)
                try:
                    async with timeout(timeout_s):
                        return await _whole(response)
                finally:
                    response.close()
            except asyncio.TimeoutError:
                raise self._timed_out(f"{method} {path} was not answered within {timeout_s:g} s") from None

    async def _send(self, method: str, path: str, body: object) -> aiohttp.ClientResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data is not None else {}
        url = self.profile.root_url + path
        return await self._session.request(method, url, data=data, headers=headers, allow_redirects=False)

    async def events(
        self, path: str, body: object, *, has_begun: Callable[[], bool]
    ) -> AsyncGenerator[ServerEvent, None]:
        """POST JSON, then the events of the reply as they come.

        has_begun: whether the first token is there; before it `first_token_s` counts, after it `between_tokens_s`
        """
        profile, clock = self.profile, asyncio.get_running_loop().time
        deadline = clock() + profile.first_token_s
        with self.translate_errors():
            try:
                async with timeout(profile.first_token_s):
                    response = await self._send("POST", path, body)
            except asyncio.TimeoutError:
                raise self._silent(False) from None
            try:
                if response.status != 200 or response.content_type != "text/event-stream":
                    raise self.refusal(await self._rest(response))
                decoder, is_open = SseDecoder(), True
                while is_open:
                    try:
                        async with timeout(max(0.0, deadline - clock())):
                            data = await response.content.readany()
                    except asyncio.TimeoutError:
                        raise self._silent(has_begun()) from None
                    is_open = bool(data) or not response.content.at_eof()
                    events = decoder.push(data) if is_open else decoder.flush()
                    for event in events:
                        yield event
                    if events and has_begun():
                        deadline = clock() + profile.between_tokens_s
            finally:
                response.close()

    async def _rest(self, response: aiohttp.ClientResponse) -> Reply:
        """What follows the head of a reply that is no stream."""
        try:
            async with timeout(ASK_S):
                return await _whole(response)
        except asyncio.TimeoutError:
            raise self._timed_out(f"a reply of status {response.status} was not whole within {ASK_S:g} s") from None

    def refusal(self, reply: Reply) -> ResidentError:
        """The error of a reply that is no stream of tokens."""
        status, where = reply.status, self.profile.address
        if 300 <= status < 400:
            return ServerError(
                f"The server {where} redirects to another address ({status}), which is not followed. "
                "Put the final address into the profile."
            )
        if status in (401, 403):
            source = f"the environment variable {self.profile.key_env}" if self.profile.key_env else "its profile"
            return ServerError(
                f"The server {where} refused the key ({status}). Check the key that profile {self.profile.name!r} "
                f"takes from {source}."
            )
        if reply.body is None and status not in (429, 503):
            what = f"{reply.content_type} instead of" if reply.text.strip() else "nothing where it should be"
            return ServerError(
                f"The server {where} answered {status} with {what} JSON. "
                "Check that the profile's base_url is that of an OpenAI-compatible server."
            )
        if status in (429, 503):
            told = error_of(status, reply.body)
            busy = Busy(f"{self.scrub(str(told))} The server {where} is too busy; run the graph again later.")
            busy.retry_after_s = reply.retry_after_s
            return busy
        if status == 200 and not (isinstance(reply.body, dict) and reply.body.get("error")):
            return ServerError(f"The server {where} answered without streaming. Use one that can stream.")
        error = error_of(status, reply.body)
        return type(error)(f"{self.scrub(str(error))} (Server {where}.)")

    def scrub(self, text: str) -> str:
        """The text without key and header values, should a server repeat them."""
        for secret in (self._key, *(value for _, value in self.profile.headers)):
            if secret:
                text = text.replace(secret, "[key]")
        return text

    def _timed_out(self, what: str) -> ServerError:
        return ServerError(f"The server {self.profile.address} is silent: {what}. Is it overloaded or shutting down?")

    def _silent(self, has_begun: bool) -> ServerError:
        seconds = self.profile.between_tokens_s if has_begun else self.profile.first_token_s
        what = "no further token" if has_begun else "no first token"
        return self._timed_out(f"{what} within {seconds:g} s")

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """aiohttp's exceptions as ours, with the address; our own pass, without the key."""
        where = self.profile.address
        try:
            yield
        except (aiohttp.ConnectionTimeoutError, aiohttp.SocketTimeoutError) as error:
            raise Unreachable(
                f"The server {where} did not accept a connection within {self.profile.connect_s:g} s. Is it up?"
            ) from error
        except aiohttp.ClientConnectorError as error:
            fault = error.os_error
            said = fault.strerror or type(fault).__name__  # asyncio's own words hold the address once more
            reason = self.scrub(os.strerror(fault.errno) if fault.errno and fault.errno > 0 else said)
            raise Unreachable(
                f"The server {where} cannot be reached ({reason}). Start it, or correct profile {self.profile.name!r}."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(
                f"The server {where} broke the connection off ({type(error).__name__}). "
                "If it is still running, run the graph again."
            ) from error
        except ResidentError as error:
            scrubbed = self.scrub(str(error))
            if scrubbed != str(error):
                error.args = (scrubbed,)
            raise

    def close(self) -> None:
        """Close all sockets. Calling it again does nothing."""
        if not self._loop.is_closed:
            self._loop.run(self._session.close())


async def _whole(response: aiohttp.ClientResponse) -> Reply:
    data = b""
    while not response.content.at_eof():
        data += await response.content.readany()
        if len(data) > MAX_BODY_BYTES:
            raise ServerError(f"The server's reply is over {MAX_BODY_BYTES} bytes. Is this address a language model?")
    text = data.decode(errors="replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    retry_after = response.headers.get("Retry-After", "")
    return Reply(
        status=response.status,
        text=text,
        body=body,
        content_type=response.content_type,
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
    )
