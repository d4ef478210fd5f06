"""The requests of one batch in flight, on one server or several: bounded, in order, retried only before they begin."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from ...errors import ResidentError, ServerError
from ...profiles import Profile
from ...telemetry import clock
from ..base import FailedStep, Step, Work
from . import facts as server
from .body import chat_body, completion_body, native_body
from .http import Busy, Http, LoopThread, Unreachable
from .wire import Endpoint, ReplyReader

log = logging.getLogger(__name__)

Queue = queue.SimpleQueue[tuple[int, Union[Step, BaseException]]]

CONNECT_TRIES = 3
BUSY_TRIES = 4
MIN_PAUSE_S = 0.05
MAX_RETRY_AFTER_S = 60.0
DEFAULT_CONTEXT_LEN = 4096

TAKES_IDS: dict[str, Endpoint] = {"vllm": "completions", "sglang": "completions", "llamacpp": "native"}
_PATHS: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "native": "/completion",
}
_TITLES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang", "ollama": "Ollama", "tabbyapi": "TabbyAPI"}


@dataclass(eq=False)
class Member:
    """One server that answers for the spec's model."""

    http: Http
    facts: server.ServerFacts
    model: server.ServedModel
    asked_at: float = field(default_factory=clock)

    @property
    def title(self) -> str:
        name = _TITLES.get(self.facts.kind, "server")
        return f"{name} {self.facts.version or ''}".strip() + f" at {self.http.profile.address}"

    def use(self, profile: Profile, loop: LoopThread) -> None:
        """Go on by this profile; a connection whose address and key are the same stays."""
        if not self.http.is_by(profile):
            self.http.close()
            self.http = Http(profile, loop)
            self.asked_at = float("-inf")

    def endpoint(self, has_ids: bool) -> Endpoint:
        return TAKES_IDS.get(self.facts.kind, "chat") if has_ids else "chat"


class Answers:
    """The requests of one batch, in flight: at most so many per server, begun in order."""

    def __init__(self, loop: LoopThread, members: Sequence[Member], batch: Sequence[Work], steps: Queue) -> None:
        self._loop = loop
        self._members = members
        self._batch = batch
        self._steps = steps
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gone: set[Member] = set()

    def start(self) -> None:
        self._loop.run(self._start())

    def cancel(self, index: int) -> None:
        """Drop one request: its socket closes."""
        if task := self._tasks.get(index):
            self._loop.call_soon(task.cancel)

    def close(self) -> None:
        """Drop what is left; its sockets are closed when this returns."""
        if not self._loop.is_closed:
            self._loop.run(self._stop())

    async def _start(self) -> None:
        self._slots: asyncio.Queue[Member] = asyncio.Queue()
        for member in await _spread(self._members):
            self._slots.put_nowait(member)
        for index, work in enumerate(self._batch):
            self._tasks[index] = asyncio.create_task(self._answer(index, work))

    async def _stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _answer(self, index: int, work: Work) -> None:
        try:
            await self._try(index, work)
        except ResidentError as error:
            self._steps.put((index, FailedStep(error=error)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._steps.put((index, error))

    async def _try(self, index: int, work: Work) -> None:
        """Ask until an answer begins; what has begun is never asked for again."""
        num_refused = num_busy = 0
        paused_s = 0.0
        while True:
            member = await self._free_member()
            try:
                await self._read(index, work, member)
                return
            except Unreachable:
                if self._give_up(member):
                    continue
                num_refused += 1
                if num_refused == CONNECT_TRIES:
                    raise
                await asyncio.sleep(0.2 * num_refused)
            except Busy as error:
                num_busy += 1
                pause = 2.0**num_busy / 2 if error.retry_after_s is None else error.retry_after_s
                paused_s += pause
                is_hopeless = num_busy == BUSY_TRIES and error.retry_after_s is None
                if is_hopeless or pause > MAX_RETRY_AFTER_S or paused_s > member.http.profile.first_token_s:
                    raise
                await asyncio.sleep(max(pause, MIN_PAUSE_S))  # in its place: that is how a busy server gets less
            finally:
                if member not in self._gone:
                    self._slots.put_nowait(member)

    async def _free_member(self) -> Member:
        while True:
            member = await self._slots.get()
            if member not in self._gone:
                return member

    def _give_up(self, member: Member) -> bool:
        """Ask a server that cannot be reached no more, if the pool has another one."""
        if len(self._gone | {member}) == len(self._members):
            return False
        if member not in self._gone:
            log.warning("%s cannot be reached; the others of its pool go on", member.title)
        self._gone.add(member)
        return True

    async def _read(self, index: int, work: Work, member: Member) -> None:
        endpoint = member.endpoint(work.encoded.token_ids is not None)
        reader = ReplyReader(
            endpoint, stop=work.encoded.stop, stop_strings=work.stop_strings, max_tokens=work.max_tokens
        )
        body = _body(endpoint, work, member)
        events = member.http.events(_PATHS[endpoint], body, has_begun=lambda: reader.has_begun)
        try:
            with member.http.translate_errors():
                async for event in events:
                    for step in reader.push(event):
                        self._steps.put((index, step))
                    if reader.is_over:
                        break
        finally:
            await events.aclose()
        end = reader.end()
        told = {"endpoint": endpoint, "server": member.title}
        self._steps.put((index, replace(end, details={**end.details, **told})))


def _body(endpoint: Endpoint, work: Work, member: Member) -> dict[str, Any]:
    if endpoint == "native":
        return native_body(work, member.model.context_len or DEFAULT_CONTEXT_LEN)
    if endpoint == "completions":
        return completion_body(work, member.model.name)
    return chat_body(work, member.model.name, member.facts.kind)


async def _spread(members: Sequence[Member]) -> list[Member]:
    """A slot for each request that may be in flight, the least busy server's first, then in turns."""
    load = dict.fromkeys(members, 0.0)
    if len(members) > 1:
        busy = await asyncio.gather(*(_num_busy(member) for member in members))
        load = dict(zip(members, busy))
    free = {member: member.http.profile.max_concurrent for member in members}
    order: list[Member] = []
    while any(free.values()):
        member = min((one for one in members if free[one]), key=lambda one: load[one])
        order.append(member)
        free[member] -= 1
        load[member] += 1
    return order


async def _num_busy(member: Member) -> float:
    try:
        reply = await member.http.ask("/metrics")
    except ServerError:
        return 0.0
    return server.num_busy(server.read_metrics(reply.text)) or 0.0
