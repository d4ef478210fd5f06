"""Answer one prompt: the text streams to stdout, thinking and status go to stderr."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import get_args

from ..collect import Collector, Result
from ..events import Event, LoadProgress, Notice, PrefillProgress, TextDelta
from ..request import Message, ModelSpec, Option, Prompt, Request, Sampling, Thinking
from ..runtime import get

HELP = "Answer a prompt with a model, streaming its text."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder or a .gguf file; PROFILE/NAME for a server")
    parser.add_argument("--prompt", required=True, help="what the user says; - reads it from stdin")
    parser.add_argument("--system", default="", help="the system message")
    parser.add_argument("--max-tokens", type=int, help="most output tokens; default: all that fit the context")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text; default: 0")
    sampling = parser.add_argument_group("sampling (the defaults are the model's own distribution)")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off")
    sampling.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is off")
    thinking = parser.add_argument_group("thinking")
    thinking.add_argument("--thinking", choices=get_args(Thinking), default="auto")
    thinking.add_argument("--thinking-budget", type=int, help="tokens after which the thinking block is closed")
    loading = parser.add_argument_group("loading")
    loading.add_argument(
        "--engine", default="auto", help="default: the first that can run MODEL here; inspect lists them"
    )
    loading.add_argument("--device", default="auto", help="auto, cpu, or a GPU such as cuda:0")
    loading.add_argument("--dtype", default="auto", help="precision of the weights: auto, fp32, bf16, fp16")
    loading.add_argument(
        "--attention", default="auto", help="auto, sdpa, flash_attention_2, eager; the report says which one ran"
    )
    loading.add_argument("--kv-cache", default="auto", help="precision of the KV cache: auto, fp16, q8, q6, q4")
    loading.add_argument("--context-len", type=int, help="most tokens, prompt and output together")
    loading.add_argument(
        "--option", action="append", default=[], type=_option, metavar="NAME=VALUE", help="an engine's own load option"
    )
    parser.add_argument("--json", action="store_true", help="print one object: text, thinking_text, report")


def run(args: argparse.Namespace) -> int:
    spec = _spec(args)
    result = _answer(spec, _request(args), streams=not args.json)
    if args.json:
        print(json.dumps({"text": result.text, "thinking_text": result.thinking_text, "report": result.report}))
    return 0


def _option(text: str) -> tuple[str, Option]:
    """`name=value` with the value as JSON where it is JSON, else as text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, parsed if isinstance(parsed, (int, float, bool)) or parsed is None else value


def _spec(args: argparse.Namespace) -> ModelSpec:
    return ModelSpec(
        model=args.model,
        engine=args.engine,
        device=args.device,
        dtype=args.dtype,
        attention=args.attention,
        kv_cache=args.kv_cache,
        context_len=args.context_len,
        options=tuple(args.option),
    )


def _request(args: argparse.Namespace) -> Request:
    system = (Message.of("system", args.system),) if args.system else ()
    user = sys.stdin.read() if args.prompt == "-" else args.prompt
    return Request(
        prompt=Prompt(messages=(*system, Message.of("user", user)), thinking=args.thinking),
        sampling=Sampling(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
        ),
        max_tokens=args.max_tokens,
        seed=args.seed,
        thinking_budget=args.thinking_budget,
    )


def _answer(spec: ModelSpec, request: Request, *, streams: bool) -> Result:
    """The result of one request; leaving early, by Ctrl-C or a closed pipe, cancels it."""
    runtime = get()
    collector = Collector(spec, [request])
    status = _Status(shows_thinking=streams)
    try:
        with contextlib.closing(runtime.generate(spec, [request])) as events:
            for event in events:
                collector.take(event)
                status.take(event)
                if streams and isinstance(event, TextDelta) and event.channel == "answer":
                    print(event.text, end="", flush=True)
        with runtime.lease(spec) as engine:
            [result] = collector.results(engine.info, engine.bytes)
    finally:
        status.clear()
        if streams and (text := collector.text(0)) and not text.endswith("\n"):
            with contextlib.suppress(BrokenPipeError):
                print(flush=True)
    if streams:
        _tell(result)
    return result


def _tell(result: Result) -> None:
    """One line about the run, on stderr."""
    report = result.report
    speed, finish = report["decode_tokens_per_s"], report["finish"]
    ended = finish["by"] if isinstance(finish, dict) else finish
    tail = f", {speed:.1f} tok/s" if isinstance(speed, float) else ""
    print(f"[{report['num_output_tokens']} tokens{tail}, ended by {ended}]", file=sys.stderr)


class _Status:
    """What goes to stderr while the request runs: notices always, progress only on a terminal."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._is_terminal = sys.stderr.isatty()
        self._has_line = False
        self._is_thinking = False

    def take(self, event: Event) -> None:
        if isinstance(event, LoadProgress) and event.total:
            self._line(f"loading {event.what} {100 * event.done // event.total} %")
        elif isinstance(event, PrefillProgress):
            self._line(f"prefill {event.num_done} of {event.num_total}, {event.num_cached} cached")
        elif isinstance(event, Notice):
            self.clear()
            print(event.text, file=sys.stderr)
        elif isinstance(event, TextDelta) and self._shows_thinking:
            self.clear()
            if event.channel == "thinking":
                print(event.text, end="", file=sys.stderr, flush=True)
            elif self._is_thinking:
                print(file=sys.stderr)
            self._is_thinking = event.channel == "thinking"

    def _line(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._has_line = True

    def clear(self) -> None:
        """Take the progress line away."""
        if self._has_line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._has_line = False
