"""A model on one server, or on several that serve the same one, as an engine."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from ...device_memory import read as read_memory
from ...errors import ResidentError
from ...events import LoadProgress
from ...profiles import Profile
from ...prompting.prompter import Prompter
from ...request import ModelSpec, Prompt
from ...telemetry import Bytes, clock
from ..base import (
    WAIT_STEP_S,
    Capabilities,
    DecodeStep,
    Drop,
    Encoded,
    EngineInfo,
    FailedStep,
    Reasoning,
    Step,
    Steps,
    WaitStep,
    Work,
)
from . import facts as server
from .answers import TAKES_IDS, Answers, Member, Queue
from .body import check_chat
from .http import LoopThread
from .observe import observe

log = logging.getLogger(__name__)

T = TypeVar("T")

PROFILE_LIFE_S = 1.0
FACTS_LIFE_S = 30.0
"""How long what a server said about itself is believed."""


class ServerEngine:
    """A model on one server, or on several that serve the same one.

    find_profile: where profiles are looked up again, as their owner may change an address or a key at any time
    """

    def __init__(
        self,
        spec: ModelSpec,
        loop: LoopThread,
        members: Sequence[Member],
        prompter: Prompter | None,
        *,
        find_profile: Callable[[str], Profile] | None = None,
    ) -> None:
        self._spec = spec
        self._find_profile = find_profile
        self._read_at = clock()
        self._loop = loop
        self._members = tuple(members)
        self._prompter = prompter
        self._warnings: tuple[str, ...] = ()
        self._is_parked = False
        self._shared_bytes = self._measure_shared()
        self.info = self._describe()

    def warn(self, warnings: Sequence[str]) -> None:
        """Put warnings into every report."""
        self._warnings = (*self._warnings, *warnings)
        self.info = self._describe()

    def _describe(self) -> EngineInfo:
        first = self._members[0]
        lengths = [member.model.context_len for member in self._members if member.model.context_len]
        kinds = {member.facts.kind for member in self._members}
        takes_ids = self._prompter is not None and kinds <= set(TAKES_IDS)
        tells_reuse = takes_ids and kinds == {"llamacpp"}
        return EngineInfo(
            engine="openai",
            model=first.model.name,
            context_len=min(lengths, default=None),
            device="server",
            dtype="the server's",
            attention="the server's",
            kv_cache="the server's",
            capabilities=Capabilities(
                has_token_ids=takes_ids, can_feed=False, can_batch=True, has_prefix_reuse=tells_reuse, is_remote=True
            ),
            warnings=self._warnings,
            details={"servers": [member.title for member in self._members]},
        )

    def _measure_shared(self) -> int:
        """Bytes of the card that sleep would free: by the profiles, else what other processes hold of it."""
        sleepers = [member.http.profile for member in self._members if self._may_sleep(member)]
        told = sum(profile.gpu_bytes for profile in sleepers)
        return told or (other_bytes(self._spec.device) if sleepers else 0)

    @property
    def bytes(self) -> Bytes:
        """What the servers hold of this machine's card, where they may be asked to let go of it; else nothing."""
        return Bytes(host_copy=self._shared_bytes) if self._is_parked else Bytes(weights=self._shared_bytes)

    def _may_sleep(self, member: Member) -> bool:
        return self._spec.when_idle != "keep" and member.facts.can_sleep and member.http.profile.is_loopback

    @property
    def is_in_place(self) -> bool:
        return True

    def park(self, max_bytes: int) -> bool:
        """Put the servers that share this machine's card to sleep; their host memory is their own affair."""
        sleepers = [member for member in self._members if self._may_sleep(member)]
        if not sleepers:
            return False
        before = other_bytes(self._spec.device)
        for member in sleepers:
            server.sleep(member.http)
        freed = before - other_bytes(self._spec.device)
        if freed > 0 and not any(member.http.profile.gpu_bytes for member in sleepers):
            self._shared_bytes = freed
        self._is_parked = True
        return True

    def unpark(self) -> Generator[LoadProgress, None, None]:
        """Wake the servers."""
        yield from progress(waiting(self._wake))
        self._is_parked = False

    def forget(self) -> int:
        return 0

    def _wake(self) -> None:
        for member in self._members:
            if member.facts.can_sleep and server.is_asleep(member.http):
                server.wake(member.http)

    def encode(self, prompt: Prompt) -> Encoded:
        self._refresh()
        if self._prompter is not None and self._members[0].facts.kind in TAKES_IDS:
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
        if self._find_profile is not None and clock() - self._read_at >= PROFILE_LIFE_S:
            self._read_at = clock()
            for member in self._members:
                member.use(self._find_profile(member.http.profile.name), self._loop)
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
        answers = Answers(self._loop, self._members, batch, steps)
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
        """Someone else may have put a server to sleep; asleep it would leave the request waiting."""
        if any(member.facts.can_sleep for member in self._members):
            for waited_s in waiting(self._wake):
                yield 0, WaitStep(what=f"{self._members[0].title} to wake up", waited_s=waited_s)

    def observe(self) -> list[dict[str, object]]:
        return [] if self._loop.is_closed else [observe(member) for member in self._members]

    def trim(self, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        """Let go of the servers; one that shares this machine's card and may sleep is put to sleep first."""
        if self._loop.is_closed:
            return
        for member in self._members:
            try:
                if self._may_sleep(member) and not self._is_parked:
                    server.sleep(member.http)
                elif self._spec.when_idle != "keep" and member.facts.kind == "ollama":
                    server.release_ollama(member.http, member.model.name)
            except ResidentError as error:
                log.warning("%s did not let go of its memory: %s", member.title, error)
            finally:
                member.http.close()
        self._loop.close()


def other_bytes(device: str) -> int:
    """Bytes of the card that are not torch's in this process; 0 without a card."""
    memory = read_memory(device)
    return 0 if memory is None or memory.device == "cpu" else max(0, memory.used - memory.torch_reserved)


STARTING = LoadProgress(done=0, total=1, what="server", unit="servers")


def progress(opening: Generator[float, None, T], shown: LoadProgress = STARTING) -> Generator[LoadProgress, None, T]:
    """The same progress again and again while something is waited for; returns what that returns."""
    while True:
        try:
            next(opening)
        except StopIteration as end:
            result: T = end.value
            return result
        yield shown


def waiting(act: Callable[[], T]) -> Generator[float, None, T]:
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
