"""Models behind an OpenAI-compatible server: vLLM, llama.cpp, SGLang, Ollama, TabbyAPI, LM Studio and their kin.

A spec names a profile and a model, "profile/model"; address and key come from the profile when they are used. Where the
server takes token ids and the profile (or a server on this machine) gives the tokenizer's folder, prompts are built by
our own prompting and sent as ids; elsewhere the chat endpoint builds them, and the report says so.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, Union

from .. import profiles
from ..errors import ModelNotFound, ResidentError, ServerError
from ..events import LoadProgress
from ..prompting.prompter import Prompter
from ..request import ModelSpec, Prompt
from ..telemetry import Bytes, clock
from . import openai_server as server
from .base import (
    WAIT_STEP_S,
    Capabilities,
    DecodeStep,
    Drop,
    Encoded,
    EngineInfo,
    FailedStep,
    Loading,
    Reasoning,
    Step,
    Steps,
    WaitStep,
    Work,
)
from .openai_body import chat_body, check_chat, completion_body, native_body
from .openai_http import Busy, Http, LoopThread, Unreachable
from .openai_wire import Endpoint, ReplyReader

log = logging.getLogger(__name__)

T = TypeVar("T")
Queue = queue.SimpleQueue[tuple[int, Union[Step, BaseException]]]

FACTS_LIFE_S = 30.0
"""How long what a server said about itself is believed."""

CONNECT_TRIES = 3
BUSY_TRIES = 4
MAX_RETRY_AFTER_S = 60.0

_TAKES_IDS: dict[str, Endpoint] = {"vllm": "completions", "sglang": "completions", "llamacpp": "native"}
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

    def endpoint(self, has_ids: bool) -> Endpoint:
        return _TAKES_IDS.get(self.facts.kind, "chat") if has_ids else "chat"


class ServerEngine:
    """A model on one server, or on several that serve the same one."""

    def __init__(self, spec: ModelSpec, loop: LoopThread, members: Sequence[Member], prompter: Prompter | None) -> None:
        self._spec = spec
        self._loop = loop
        self._members = tuple(members)
        self._prompter = prompter
        self._warnings: tuple[str, ...] = ()
        self.info = self._describe()

    def warn(self, warnings: Sequence[str]) -> None:
        """Put warnings into every report."""
        self._warnings = (*self._warnings, *warnings)
        self.info = self._describe()

    def _describe(self) -> EngineInfo:
        first = self._members[0]
        lengths = [member.model.context_len for member in self._members if member.model.context_len]
        kinds = {member.facts.kind for member in self._members}
        takes_ids = self._prompter is not None and kinds <= set(_TAKES_IDS)
        return EngineInfo(
            engine="openai",
            model=first.model.name,
            context_len=min(lengths, default=None),
            device="server",
            dtype="the server's",
            attention="the server's",
            kv_cache="the server's",
            capabilities=Capabilities(
                has_token_ids=takes_ids, can_feed=False, can_batch=True, has_prefix_reuse=takes_ids, is_remote=True
            ),
            warnings=self._warnings,
            details={"servers": [member.title for member in self._members]},
        )

    @property
    def bytes(self) -> Bytes:
        """What the server holds of this machine's GPU, where the profile says so and it may be asked to let go."""
        held = sum(member.http.profile.gpu_bytes for member in self._members if self._may_sleep(member))
        return Bytes(weights=held)

    def _may_sleep(self, member: Member) -> bool:
        return self._spec.when_idle != "keep" and member.facts.can_sleep and member.http.profile.is_loopback

    def encode(self, prompt: Prompt) -> Encoded:
        self._refresh()
        if self._prompter is not None and self._members[0].facts.kind in _TAKES_IDS:
            return self._prompter.encode(prompt)
        notes = check_chat(prompt, self._members[0].facts.kind)
        open_tag, close_tag = prompt.thinking_tags or ("<think>", "</think>")
        return Encoded(
            prompt=prompt,
            token_ids=None,
            text="",
            reasoning=None if prompt.thinking == "off" else Reasoning(open_tag=open_tag, close_tag=close_tag),
            notes=notes,
        )

    def _refresh(self) -> None:
        """Ask again what the servers are, now and then; one that is gone says so when it is used."""
        for member in self._members:
            if clock() - member.asked_at < FACTS_LIFE_S:
                continue
            member.asked_at = clock()
            try:
                member.facts = server.ask_facts(member.http)
                member.model = member.facts.find(member.model.name, member.http.profile.address)
            except ResidentError as error:
                log.debug("%s: %s", member.http.profile.address, error)
        self.info = self._describe()

    def generate(self, batch: Sequence[Work]) -> Steps:
        yield from self._waken()
        steps: Queue = queue.SimpleQueue()
        answers = _Answers(self._loop, self._members, batch, steps)
        answers.start()
        live = set(range(len(batch)))
        heard_at = clock()
        try:
            while live:
                try:
                    index, step = steps.get(timeout=WAIT_STEP_S)
                except queue.Empty:
                    yield min(live), WaitStep(what=self._members[0].title, waited_s=clock() - heard_at)
                    continue
                if isinstance(step, BaseException):
                    raise step
                if index not in live:
                    continue
                heard_at = clock()
                if isinstance(step, FailedStep) or (isinstance(step, DecodeStep) and step.finish):
                    live.discard(index)
                if isinstance((yield index, step), Drop):
                    live.discard(index)
                    answers.cancel(index)
        finally:
            answers.close()

    def _waken(self) -> Generator[tuple[int, Step], Any, None]:
        for member in self._members:
            if member.facts.can_sleep:
                for waited_s in _while(partial(_wake, member.http)):
                    yield 0, WaitStep(what=f"{member.title} to wake up", waited_s=waited_s)

    def trim(self, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        """Let go of the servers; one that shares this machine's card and may sleep is put to sleep first."""
        if self._loop.is_closed:
            return
        for member in self._members:
            try:
                if self._may_sleep(member):
                    server.sleep(member.http)
                elif self._spec.when_idle != "keep" and member.facts.kind == "ollama":
                    server.release_ollama(member.http, member.model.name)
            except ResidentError as error:
                log.warning("%s did not let go of its memory: %s", member.title, error)
            finally:
                member.http.close()
        self._loop.close()


def _wake(http: Http) -> None:
    if server.is_asleep(http):
        server.wake(http)


class _Answers:
    """The requests of one batch, in flight: at most so many per server, begun in order."""

    def __init__(self, loop: LoopThread, members: Sequence[Member], batch: Sequence[Work], steps: Queue) -> None:
        self._loop = loop
        self._members = members
        self._batch = batch
        self._steps = steps
        self._tasks: dict[int, asyncio.Task[None]] = {}

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
        begun_at = clock()
        while True:
            member = await self._slots.get()
            try:
                await self._read(index, work, member)
                return
            except Unreachable:
                num_refused += 1
                if num_refused == CONNECT_TRIES:
                    raise
                pause = 0.2 * num_refused
            except Busy as error:
                num_busy += 1
                if num_busy == BUSY_TRIES and error.retry_after_s is None:
                    raise
                pause = 2.0**num_busy / 2 if error.retry_after_s is None else error.retry_after_s
                if pause > MAX_RETRY_AFTER_S or clock() + pause - begun_at > member.http.profile.first_token_s:
                    raise
                await asyncio.sleep(pause)
                pause = 0
            finally:
                self._slots.put_nowait(member)
            await asyncio.sleep(pause)

    async def _read(self, index: int, work: Work, member: Member) -> None:
        endpoint = member.endpoint(work.encoded.token_ids is not None)
        reader = ReplyReader(
            endpoint, stop=work.encoded.stop, stop_strings=work.stop_strings, max_tokens=work.max_tokens
        )
        body = _body(endpoint, work, member)
        events = member.http.events(_PATHS[endpoint], body, has_begun=lambda: reader.has_begun)
        try:
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
        return native_body(work)
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


def load(spec: ModelSpec) -> Loading:
    """Find the servers, check the model, and read its tokenizer where prompts can go as ids."""
    named = spec.option("profile")
    name, model = (str(named), spec.model) if named else profiles.split_model(spec.model)
    first = profiles.find(name)
    members: list[Member] = []
    loop = LoopThread()
    try:
        faults: list[ResidentError] = []
        for profile in (first, *map(profiles.find, first.pool)):
            try:
                members.append((yield from _progress(_while(partial(_join, Http(profile, loop), model)))))
            except ServerError as error:
                faults.append(error)
        if not members:
            raise faults[0]
        return _engine(spec, loop, members, faults)
    except BaseException:
        for member in members:
            member.http.close()
        loop.close()
        raise


def _join(http: Http, model: str) -> Member:
    try:
        facts = server.ask_facts(http)
        found = facts.find(model, http.profile.address)
        if not http.profile.allows(found.name):
            raise ModelNotFound(
                f"Profile {http.profile.name!r} does not allow the model {found.name!r}. "
                f"It allows: {', '.join(http.profile.models)}."
            )
    except BaseException:
        http.close()
        raise
    return Member(http, facts, found)


def _engine(spec: ModelSpec, loop: LoopThread, members: list[Member], faults: Sequence[ResidentError]) -> ServerEngine:
    first = members[0]
    folder = first.http.profile.tokenizer or first.model.root
    prompter = Prompter.load(folder) if folder and first.facts.kind in _TAKES_IDS else None
    if prompter is not None:
        server.check_tokenizer(first.http, first.facts.kind, first.model.name, prompter.encode(Prompt.of("Hi.")))
    engine = ServerEngine(spec, loop, members, prompter)
    warnings = [f"Left out of the pool: {fault}" for fault in faults]
    if spec.when_idle == "sleep" and not any(member.facts.can_sleep for member in members):
        warnings.append(
            f"when_idle is sleep, but {first.title} has no sleep endpoints, so it keeps its memory. Start vLLM with "
            "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 on this machine's loopback address."
        )
    engine.warn(warnings)
    return engine


def _progress(opening: Generator[float, None, T]) -> Generator[LoadProgress, None, T]:
    while True:
        try:
            next(opening)
        except StopIteration as end:
            result: T = end.value
            return result
        yield LoadProgress(done=0, total=1, what="server", unit="servers")


def _while(act: Callable[[], T]) -> Generator[float, None, T]:
    """Run `act` in a thread, yield the seconds waited so far, return or raise what it did."""
    outcome: list[T] = []
    fault: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(act())
        except BaseException as error:
            fault.append(error)

    thread = threading.Thread(target=run, name="resident-llm-ask", daemon=True)
    begun_at = clock()
    thread.start()
    while thread.is_alive():
        thread.join(WAIT_STEP_S)
        if thread.is_alive():
            yield clock() - begun_at
    if fault:
        raise fault[0]
    return outcome[0]
