"""Server profiles: add one, list them, test one. A key is shown nowhere."""

from __future__ import annotations

import argparse
import getpass
import os
import sys

from .. import profiles
from ..profiles import Profile

HELP = "Add, list or test server profiles; graphs name a profile, and never hold its address or key."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", metavar="PATH", help="the profile file; default: the one that ComfyUI uses")
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|test")
    add = actions.add_parser("add", help="add or replace a profile")
    add.add_argument("name")
    add.add_argument("--url", required=True, help="http(s)://host:port of the server")
    key = add.add_mutually_exclusive_group()
    key.add_argument("--key-env", metavar="VARIABLE", help="environment variable that holds the key when ComfyUI runs")
    key.add_argument("--ask-key", action="store_true", help="ask for the key now (or read it from stdin), and store it")
    add.add_argument("--model", action="append", default=[], help="allow only this model; may be repeated")
    add.add_argument("--tokenizer", metavar="PATH", help="folder or GGUF of the served model, for prompts as ids")
    add.add_argument("--uses-chat", action="store_true", help="let the server build prompts by its chat endpoint")
    add.add_argument("--header", action="append", default=[], type=_pair, metavar="NAME=VALUE")
    add.add_argument("--pool", action="append", default=[], metavar="NAME", help="another profile for the same model")
    add.add_argument("--max-concurrent", type=int, default=16)
    add.add_argument("--gpu-bytes", type=int, default=0, help="what the server holds of this machine's GPU")
    add.add_argument("--proxy-from-env", action="store_true", help="use HTTP_PROXY and its kin")
    actions.add_parser("list", help="show all profiles, without their keys")
    test = actions.add_parser("test", help="ask a server what it is and what it serves")
    test.add_argument("name")


def run(args: argparse.Namespace) -> int:
    if args.file:
        os.environ[profiles.PATH_VARIABLE] = args.file
    actions = {"add": _add, "list": _list, "test": _test}
    return actions[args.action](args)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _add(args: argparse.Namespace) -> int:
    key = None
    if args.ask_key:
        key = (getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip() or None
    profile = Profile(
        name=args.name,
        base_url=args.url,
        key_env=args.key_env,
        key=key,
        models=tuple(args.model),
        headers=tuple(sorted(args.header)),
        tokenizer=os.path.abspath(args.tokenizer) if args.tokenizer else None,
        uses_chat=args.uses_chat,
        proxy_from_env=args.proxy_from_env,
        max_concurrent=args.max_concurrent,
        pool=tuple(args.pool),
        gpu_bytes=args.gpu_bytes,
    )
    path = profiles.write(profile)
    print(f"Profile {profile.name} is in {path}")
    if profile.base_url.startswith("http:") and not profile.is_loopback and (profile.key or profile.key_env):
        print(
            f"The key travels unencrypted to {profile.address}; use https if others share the network.", file=sys.stderr
        )
    return 0


def _list(args: argparse.Namespace) -> int:
    for profile in profiles.read().values():
        key = f"key from ${profile.key_env}" if profile.key_env else ("stored key" if profile.key else "no key")
        models = ", ".join(profile.models) or "any model"
        print(f"{profile.name:20} {profile.base_url:32} {key:24} {models}")
    return 0


def _test(args: argparse.Namespace) -> int:
    from ..engines.server.facts import ask_facts
    from ..engines.server.http import Http, LoopThread

    profile = profiles.find(args.name)
    loop = LoopThread()
    try:
        http = Http(profile, loop)
        try:
            facts = ask_facts(http)
        finally:
            http.close()
    finally:
        loop.close()
    print(f"{profile.name} at {profile.address}: {facts.kind} {facts.version or ''}".rstrip())
    print(f"sleep and wake: {'yes' if facts.can_sleep else 'no'}")
    for model in facts.models:
        length = f", context of {model.context_len}" if model.context_len else ""
        blocked = "" if profile.allows(model.name) else ", not allowed by this profile"
        print(f"model {model.name}{length}{blocked}")
    return 0
