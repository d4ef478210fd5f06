"""Show what a model reads: the rendered prompt, its ids, and what ends its answer. No weights are loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..errors import InvalidValue
from ..request import Message, Prompt, Thinking

if TYPE_CHECKING:
    from ..engines.base import Encoded

HELP = "Show the prompt that a model would read, its token ids and its stop conditions, without loading weights."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder or a .gguf file")
    parser.add_argument("--user", help="what the user says; - reads it from stdin")
    parser.add_argument("--system", default="", help="the system message")
    parser.add_argument("--answer-prefix", default="", help="how the answer begins")
    parser.add_argument("--thinking", choices=get_args(Thinking), default="auto")
    parser.add_argument("--template", help="a built-in rule, or the path of a Jinja file; default: the model's own")
    parser.add_argument("--fold-system", action="store_true", help="put a refused system text into the user's")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument(
        "--json-lines",
        metavar="FILE",
        help='read {"system": ..., "user": ...} from each line of a file (- is stdin); print one object per line',
    )


def run(args: argparse.Namespace) -> int:
    from ..prompting.prompter import Prompter  # brings jinja2 and tokenizers

    if (args.user is None) == (args.json_lines is None):
        raise InvalidValue("Give either --user or --json-lines.")
    prompter = Prompter.load(args.model)
    if args.json_lines is not None:
        for number, turn in enumerate(_turns(args.json_lines), start=1):
            try:
                encoded = prompter.encode(_prompt(args, **turn))
            except ValueError as error:
                raise InvalidValue(f"Line {number}: {error}") from error
            print(json.dumps(_as_dict(encoded)), flush=True)
        return 0
    user = sys.stdin.read() if args.user == "-" else args.user
    encoded = prompter.encode(_prompt(args, system=args.system, user=user))
    print(json.dumps(_as_dict(encoded)) if args.json else "\n".join(_lines(encoded)))
    return 0


def _turns(name: str) -> Iterator[dict[str, str]]:
    text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            turn = json.loads(line)
        except ValueError as error:
            raise InvalidValue(f"Line {number} is not JSON: {error}.") from error
        known = isinstance(turn, dict) and set(turn) <= {"system", "user"} and "user" in turn
        if not known or not all(isinstance(text, str) for text in turn.values()):
            raise InvalidValue(f'Line {number} is not {{"system": text, "user": text}}; system may be left out.')
        yield turn


def _prompt(args: argparse.Namespace, *, user: str, system: str | None = None) -> Prompt:
    system = args.system if system is None else system
    template = args.template
    if template is not None and Path(template).is_file():
        template = Path(template).read_text(encoding="utf-8")
    return Prompt(
        messages=(*((Message.of("system", system),) if system else ()), Message.of("user", user)),
        thinking=args.thinking,
        answer_prefix=args.answer_prefix,
        template=template,
        fold_system=args.fold_system,
    )


def _as_dict(encoded: Encoded) -> dict[str, Any]:
    reasoning = encoded.reasoning
    return {
        "rendered": encoded.text,
        "ids": list(encoded.token_ids or ()),
        "num_tokens": encoded.num_tokens,
        "stop": [asdict(entry) for entry in encoded.stop],
        "thinking": None if reasoning is None else asdict(reasoning),
        "notes": list(encoded.notes),
    }


def _lines(encoded: Encoded) -> Iterator[str]:
    """The prompt for a reader."""
    yield encoded.text
    yield f"\n{encoded.num_tokens} tokens: {' '.join(map(str, encoded.token_ids or ()))}"
    yield "\nThe answer ends with:"
    yield from (f"  {entry.id:>7}  {entry.text}  ({entry.source})" for entry in encoded.stop)
    if not encoded.stop:
        yield "  nothing that the model's files name"
    yield from (f"\nNote: {note}" for note in encoded.notes)
