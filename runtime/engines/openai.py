"""Models behind an OpenAI-compatible server: vLLM, llama.cpp, SGLang, Ollama, TabbyAPI, LM Studio and their kin.

A spec names a profile and a model, "profile/model"; address and key come from the profile when they are used. Where the
server takes token ids and the profile (or a server on this machine) gives the tokenizer's folder, prompts are built by
our own prompting and sent as ids; elsewhere the chat endpoint builds them, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .. import profiles
from ..errors import ModelNotFound, ResidentError, ServerError
from ..prompting.prompter import Prompter
from ..request import ModelSpec, Prompt
from .base import Loading
from .server.answers import TAKES_IDS, Member
from .server.engine import ServerEngine, progress, waiting
from .server.facts import ask_facts, check_tokenizer
from .server.http import Http, LoopThread


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
                members.append((yield from progress(waiting(partial(_join, Http(profile, loop), model)))))
            except ServerError as error:
                faults.append(error)
        if not members:
            raise faults[0]
        return (yield from _engine(spec, loop, members, faults))
    except BaseException:
        for member in members:
            member.http.close()
        loop.close()
        raise


def _join(http: Http, model: str) -> Member:
    try:
        facts = ask_facts(http)
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


def _engine(spec: ModelSpec, loop: LoopThread, members: list[Member], faults: Sequence[ResidentError]) -> Loading:
    first = members[0]
    prompter = yield from progress(waiting(partial(_read_tokenizer, first)))
    engine = ServerEngine(spec, loop, members, prompter, find_profile=profiles.find)
    warnings = [f"Left out of the pool: {fault}" for fault in faults]
    can_let_go = any(member.facts.can_sleep or member.facts.kind == "ollama" for member in members)
    if spec.when_idle != "keep" and not can_let_go:
        warnings.append(
            f"when_idle is {spec.when_idle}, but {first.title} has no sleep endpoints, so it keeps its memory. "
            "Start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 on this machine's loopback address."
        )
    engine.warn(warnings)
    return engine


def _read_tokenizer(member: Member) -> Prompter | None:
    """What builds prompts for a server that takes ids; None where its chat endpoint does, by ability or by choice."""
    profile = member.http.profile
    folder = profile.tokenizer or member.model.root
    if not folder or profile.uses_chat or member.facts.kind not in TAKES_IDS:
        return None
    prompter = Prompter.load(folder)
    check_tokenizer(member.http, member.facts.kind, member.model.name, prompter.encode(Prompt.of("Hi.")))
    return prompter
