"""What well-known write-ups about fast local LLMs claim, what is true, and what this pack does instead."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("claims.json")

VERDICTS = {
    "true": "true",
    "false": "not true",
    "version-bound": "true of some versions only",
    "unverifiable": "not verifiable",
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of one write-up.

    verdict: a key of VERDICTS, about the part that a reader would act on
    truth:   what is so, and why
    ours:    what this pack does instead
    """

    id: str
    claim: str
    verdict: str
    truth: str
    ours: str


@dataclass(frozen=True, kw_only=True)
class WriteUp:
    """A write-up and its claims, in their order."""

    id: str
    title: str
    claims: tuple[Claim, ...]


def write_ups() -> list[WriteUp]:
    """All of them, in order."""
    return [
        WriteUp(
            id=one["id"],
            title=one["title"],
            claims=tuple(
                Claim(id=id, claim=claim, verdict=verdict, truth=truth, ours=ours)
                for id, claim, verdict, truth, ours in one["claims"]
            ),
        )
        for one in json.loads(DATA.read_text(encoding="utf-8"))
    ]


def find(words: str) -> list[Claim]:
    """The claim of that id, else all claims that hold every one of the words; all of them for no words."""
    every = [claim for one in write_ups() for claim in one.claims]
    if exact := [claim for claim in every if claim.id.lower() == words.lower()]:
        return exact
    wanted = words.lower().split()
    return [one for one in every if all(word in f"{one.id} {one.claim} {one.truth}".lower() for word in wanted)]
