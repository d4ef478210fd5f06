"""The benchmark of a model behind a server."""

import pytest

from runtime import GREEDY, ModelSpec, Prompt, Runtime, profiles
from runtime.benchmark.plan import Plan
from runtime.benchmark.run import RowDone, run
from runtime.benchmark.sample import Unstoppable
from runtime.engines.base import Encoded, StopEntry, Work
from runtime.engines.server.body import chat_body, completion_body, native_body
from runtime.profiles import Profile
from tests.servers.scripted_server import DONE, ScriptedServer, delta, event, stream

CHAT = "/v1/chat/completions"


class Encoding:
    """An engine that only encodes."""

    def encode(self, prompt):
        return Encoded(prompt=prompt, token_ids=(5, 6), text="", stop=(StopEntry(id=2, text="</s>", source="config"),))


def work(encoded):
    return Work(encoded=encoded, sampling=GREEDY, max_tokens=8, seed=0)


@pytest.mark.parametrize(
    "body_of",
    [
        lambda one: chat_body(one, "m", "vllm"),
        lambda one: completion_body(one, "m"),
        lambda one: native_body(one, 64),
    ],
    ids=["chat", "completions", "native"],
)
def test_only_a_benchmark_asks_a_server_to_go_on_after_its_end(body_of):
    prompt = Prompt.of("hello")

    ordinary = body_of(work(Encoding().encode(prompt)))
    endless = body_of(work(Unstoppable(Encoding()).encode(prompt)))

    assert not ordinary.get("ignore_eos")
    assert endless["ignore_eos"] is True
    assert "stop_token_ids" not in endless


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv(profiles.PATH_VARIABLE, str(tmp_path / "profiles.json"))
    with ScriptedServer() as server:
        profiles.write(Profile(name="box", base_url=server.url))
        usage = event(choices=[], usage={"prompt_tokens": 64, "completion_tokens": 2})
        server.routes[CHAT] = stream(delta("a"), delta("b", "length"), usage, DONE)
        yield ModelSpec(model="box/tiny", engine="openai")


def rows_of(spec, output_tokens):
    plan = Plan(specs=(spec,), contexts=(64,), output_tokens=output_tokens, repeats=1, warmup=0)
    runtime = Runtime()
    try:
        return [event.row for event in run(plan, runtime) if isinstance(event, RowDone)]
    finally:
        runtime.close()


def test_a_server_that_writes_fewer_tokens_than_asked_for_gives_no_row_of_figures(spec):
    [row] = rows_of(spec, 4)

    assert "wrote 2 tokens where 4 were asked for" in row["errors"][0]
    assert row["decode_tokens_per_s"] is None
