"""The server engine against a server that misbehaves by script."""

import itertools
import json
import socket
import threading

import pytest

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime, collect, profiles
from runtime.engines.server import http
from runtime.errors import ContextOverflow, ModelNotFound, ResidentError, ServerError, TemplateFailed
from runtime.events import Failed, TextDelta, Waiting
from runtime.profiles import Profile
from tests.servers.scripted_server import DONE, MODELS, ScriptedServer, delta, event, reply, stream

CHAT = "/v1/chat/completions"
KEY = "sk-very-secret-0123456789"


@pytest.fixture
def server():
    with ScriptedServer() as one:
        yield one


@pytest.fixture
def spec(server, tmp_path, monkeypatch):
    """Write a profile for the scripted server, give the spec that uses it."""
    monkeypatch.setenv(profiles.PATH_VARIABLE, str(tmp_path / "profiles.json"))

    def make(model="tiny", *, when_idle="keep", name="box", url=None, **fields):
        profiles.write(Profile(name=name, base_url=url or server.url, **fields))
        return ModelSpec(model=f"{name}/{model}", engine="openai", when_idle=when_idle)

    return make


def ask(text="Say hi.", **fields):
    prompt = {key: fields.pop(key) for key in list(fields) if key in Prompt.__dataclass_fields__}
    return Request(prompt=Prompt(messages=Prompt.of(text).messages, **prompt), **fields)


def run(the_spec, *requests):
    """The results of a batch; the runtime is closed after it."""
    requests = requests or (ask(),)
    runtime = Runtime()
    try:
        collector = collect(runtime.generate(the_spec, requests), the_spec, requests)
        resident = runtime.residents()[0]
        return collector.results(resident.info, resident.bytes)
    finally:
        runtime.close()


def good(*texts):
    return stream(*map(delta, texts), delta("", "stop"), DONE)


def test_a_chat_answer_comes_with_its_endpoint_in_the_report(server, spec):
    usage = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 3})
    server.routes[CHAT] = stream(delta("Hello"), delta(" you", "stop"), usage, DONE)

    [result] = run(spec())

    assert result.text == "Hello you"
    assert result.report["endpoint"] == "chat"
    assert (result.report["num_prompt_tokens"], result.report["num_output_tokens"]) == (9, 3)
    assert result.report["finish"] == {"reason": "stop", "by": "server"}


def test_the_body_holds_explicit_sampling_and_the_seed_and_the_stops(server, spec):
    server.routes[CHAT] = good("x")

    run(spec(), ask(sampling=GREEDY, seed=2**64 - 1, max_tokens=7, stop_strings=("END",), thinking="off"))

    [body] = server.bodies(CHAT)
    expected = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 2**63 - 1,
    }
    assert expected.items() <= body.items()
    assert body["max_tokens"] == 7
    assert body["stop"] == ["END"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"] == [{"role": "user", "content": "Say hi."}]


def test_a_list_keeps_its_order_and_its_bound(server, spec):
    def answer(connection, seen):
        text = seen.body["messages"][0]["content"]
        good(f"re: {text}")(connection, seen)

    server.routes[CHAT] = answer

    results = run(spec(max_concurrent=4), *(ask(f"p{n}") for n in range(40)))

    assert [result.text for result in results] == [f"re: p{n}" for n in range(40)]
    assert server.max_open <= 4
    assert [body["messages"][0]["content"] for body in server.bodies(CHAT)[:4]] != []


def test_one_bad_item_fails_alone(server, spec):
    def answer(connection, seen):
        bad = seen.body["messages"][0]["content"] == "p1"
        (reply({"error": {"message": "no"}}, 500) if bad else good("fine"))(connection, seen)

    server.routes[CHAT] = answer
    runtime, the_spec = Runtime(), spec()

    events = list(runtime.generate(the_spec, [ask(f"p{n}") for n in range(3)]))

    runtime.close()
    [failed] = [one for one in events if isinstance(one, Failed)]
    assert failed.index == 1
    assert sorted(one.index for one in events if isinstance(one, TextDelta)) == [0, 2]


BAD = {
    "stops in the middle": (stream(delta("a")), "broke off"),
    "ends without a reason": (stream(delta("a"), DONE), "broke off"),
    "error event": (stream(delta("a"), event(error={"message": "engine died"}), DONE), "engine died"),
    "500": (reply({"error": {"message": "boom", "code": 500}}, 500), r"\(500\): boom"),
    "html": (reply(b"<html>hi</html>", 200, "text/html"), "text/html instead of JSON"),
    "html with 502": (reply(b"<html>bad gateway</html>", 502, "text/html"), "502 with text/html"),
    "redirect": (reply({}, 302, Location="http://127.0.0.1:9/"), "redirects to another address"),
    "closes at once": (lambda connection, seen: None, "broke the connection off"),
    "closes in the headers": (lambda connection, seen: connection.send(b"HTTP/1.1 200 OK\r\nConte"), "broke the conn"),
    "no http": (lambda connection, seen: connection.send(b"SSH-2.0-x\r\n\r\n"), "broke the connection off"),
    "wrong types": (stream(event(choices=[{"delta": {"content": 7}}])), "wrong shape"),
    "not json": (stream(b"data: oops\n\n"), "no JSON"),
    "no stream": (reply({"choices": [{"message": {"content": "a"}}]}), "without streaming"),
    "error with 200": (reply({"error": "Model is loading"}), "Model is loading"),
    "401": (reply({"error": "Unauthorized"}, 401), "refused the key"),
    "404": (reply({"detail": "Not Found"}, 404), "Not Found"),
    "unknown model": (reply({"error": {"message": "The model `x` does not exist."}}, 404), "does not exist"),
    "cut chunked body": (
        lambda connection, seen: connection.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n400\r\n"
            + delta("a", "stop")
        ),
        "broke the connection off",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_server_raises_a_sentence_with_its_address_and_gives_no_text(server, spec, name):
    server.routes[CHAT], message = BAD[name]

    with pytest.raises(ResidentError, match=message) as caught:
        run(spec())

    assert "Traceback" not in str(caught.value)
    assert len(server.bodies(CHAT)) == 1


def test_an_endless_line_is_refused_without_holding_it(server, spec):
    def act(connection, seen):
        connection.head()
        for _ in range(10):
            connection.send(b"x" * 1_000_000)

    server.routes[CHAT] = act

    with pytest.raises(ServerError, match="one event of over"):
        run(spec())


@pytest.mark.parametrize(
    ("begun", "message"),
    [((), r"no first token within 0\.3 s"), ((delta("a"),), r"no further token within 0\.2 s")],
)
def test_silence_is_told_with_address_and_seconds(server, spec, begun, message):
    def act(connection, seen):
        connection.head()
        for piece in begun:
            connection.send(piece)
        for _ in range(100):
            connection.send(b": keep-alive\n\n")
            if connection.wait_for_close(0.05):
                return

    server.routes[CHAT] = act

    with pytest.raises(ServerError, match=f"127.0.0.1:{server.port} is silent: {message}"):
        run(spec(first_token_s=0.3, between_tokens_s=0.2))


def test_a_refusal_that_never_ends_is_told_too(server, spec, monkeypatch):
    def act(connection, seen):
        connection.head(500, "application/json", Content_Length="99")
        connection.wait_for_close()

    server.routes[CHAT] = act
    monkeypatch.setattr(http, "ASK_S", 0.2)

    with pytest.raises(ServerError, match=f"{server.port} is silent: a reply of status 500 was not whole within 0.2 s"):
        run(spec())


def test_a_port_where_nothing_listens_is_told_with_the_profile(spec):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with pytest.raises(ServerError, match=f"127.0.0.1:{port} cannot be reached .*profile 'box'"):
        run(spec(url=f"http://127.0.0.1:{port}"))


def test_a_server_that_says_nothing_shows_signs_of_life_and_an_interrupt_closes_its_socket(server, spec):
    closed = threading.Event()

    def act(connection, seen):
        if connection.wait_for_close():
            closed.set()

    server.routes[CHAT] = act
    runtime = Runtime()
    events = runtime.generate(spec(), [ask()])

    waiting = list(itertools.islice((one for one in events if isinstance(one, Waiting)), 3))
    events.close()

    assert closed.wait(5)
    assert waiting[-1].waited_s > waiting[0].waited_s > 0
    assert str(server.port) in waiting[0].what
    runtime.close()


def test_an_interrupt_arrives_however_fast_the_server_writes(server, spec):
    """One that comes together with new bytes must not be lost, or the answer would go on to its end."""

    def endless(connection, seen):
        connection.head()
        while True:
            connection.send(delta("word "))

    server.routes[CHAT] = endless
    runtime, the_spec = Runtime(), spec()

    def interrupt_often():
        for _ in range(60):
            events = runtime.generate(the_spec, [ask(), ask()])
            next(one for one in events if isinstance(one, TextDelta))
            events.close()

    thread = threading.Thread(target=interrupt_often, daemon=True)
    thread.start()
    thread.join(60)

    assert not thread.is_alive()
    runtime.close()


def test_a_stop_string_matched_here_closes_the_socket(server, spec):
    closed = threading.Event()

    def act(connection, seen):
        connection.head()
        connection.send(delta("one STOP two"))
        if connection.wait_for_close():
            closed.set()

    server.routes[CHAT] = act

    [result] = run(spec(), ask(stop_strings=("STOP",)))

    assert result.text == "one "
    assert closed.wait(5)


def test_a_busy_server_is_asked_again_as_it_says_and_nothing_is_lost(server, spec):
    refusals = itertools.count()

    def act(connection, seen):
        if next(refusals) < 8:
            reply({"error": {"message": "queue full"}}, 503, Retry_After="0")(connection, seen)
        else:
            good(seen.body["messages"][0]["content"])(connection, seen)

    server.routes[CHAT] = act

    results = run(spec(), *(ask(f"p{n}") for n in range(20)))

    assert [result.text for result in results] == [f"p{n}" for n in range(20)]
    assert len(server.bodies(CHAT)) == 28


def test_a_list_of_500_on_a_server_that_takes_4_at_a_time_is_answered_whole_and_in_order(server, spec):
    places = threading.Semaphore(4)

    def act(connection, seen):
        if not places.acquire(blocking=False):
            reply({"error": {"message": "queue full"}}, 503, Retry_After="0")(connection, seen)
            return
        try:
            good(seen.body["messages"][0]["content"])(connection, seen)
        finally:
            places.release()

    server.routes[CHAT] = act

    results = run(spec(max_concurrent=12), *(ask(f"p{n}") for n in range(500)))

    assert [result.text for result in results] == [f"p{n}" for n in range(500)]
    assert server.max_open <= 12


def test_a_retry_after_beyond_patience_is_told_at_once(server, spec):
    server.routes[CHAT] = reply({"error": {"message": "queue full"}}, 503, Retry_After="3600")

    with pytest.raises(ServerError, match=r"queue full.*too busy"):
        run(spec())


def test_what_has_begun_is_never_asked_for_again(server, spec):
    server.routes[CHAT] = stream(delta("a"), event(error={"message": "overloaded", "code": 503}))

    with pytest.raises(ServerError, match="overloaded"):
        run(spec())

    assert len(server.bodies(CHAT)) == 1


def test_a_model_that_is_not_served_is_told_with_those_that_are(spec):
    with pytest.raises(ModelNotFound, match=r"does not serve 'other'\. It serves: tiny"):
        run(spec("other"))


def test_a_model_outside_the_profiles_list_is_refused(spec):
    with pytest.raises(ModelNotFound, match="does not allow the model 'tiny'"):
        run(spec(models=("big",)))


def test_a_prompt_that_the_server_finds_too_long_is_a_context_overflow(server, spec):
    server.routes[CHAT] = reply(
        {"error": {"type": "exceed_context_size_error", "message": "request (99 tokens) exceeds"}}, 400
    )

    with pytest.raises(ContextOverflow, match="99 tokens"):
        run(spec())


def test_an_answer_prefix_needs_a_server_that_goes_on_with_it(spec):
    with pytest.raises(TemplateFailed, match="tokenizer"):
        run(spec(), ask(answer_prefix="Sure"))


def test_thinking_told_by_the_server_is_not_in_the_answer(server, spec):
    thought = event(choices=[{"index": 0, "delta": {"reasoning": "hm hm"}}])
    server.routes[CHAT] = stream(thought, delta("Yes.", "stop"), DONE)

    [result] = run(spec())

    assert (result.thinking_text, result.text) == ("hm hm", "Yes.")


def test_the_key_comes_from_the_environment_and_is_in_no_message_and_no_file(
    server, spec, monkeypatch, caplog, tmp_path
):
    monkeypatch.setenv("BOX_KEY", KEY)
    caplog.set_level("DEBUG")
    server.routes[CHAT] = reply({"error": {"message": f"bad thing with Bearer {KEY}"}}, 500)
    the_spec = spec(key_env="BOX_KEY")

    with pytest.raises(ServerError) as caught:
        run(the_spec)

    assert server.seen[-1].headers["authorization"] == f"Bearer {KEY}"
    chain, error = [], caught.value
    while error is not None:
        chain.append(f"{error!r} {error}")
        error = error.__cause__ or error.__context__
    stored = (tmp_path / "profiles.json").read_text()
    assert KEY not in " ".join(chain) + caplog.text + repr(the_spec) + stored
    assert "[key]" in str(caught.value)


def test_a_key_in_an_error_event_of_a_good_stream_is_not_shown(server, spec):
    server.routes[CHAT] = stream(delta("a"), event(error={"message": f"bad {KEY} with other-secret"}), DONE)

    with pytest.raises(ServerError, match=r"bad \[key\] with \[key\]"):
        run(spec(key=KEY, headers=(("X-Other", "other-secret"),)))


def test_a_key_that_changes_while_the_model_is_loaded_is_used_from_then_on(server, spec, monkeypatch):
    monkeypatch.setattr("runtime.engines.server.engine.PROFILE_LIFE_S", 0.0)
    monkeypatch.setenv("BOX_KEY", "old-key")
    server.routes[CHAT] = good("x")
    the_spec, runtime = spec(key_env="BOX_KEY"), Runtime()
    list(runtime.generate(the_spec, [ask()]))

    monkeypatch.setenv("BOX_KEY", "new-key")
    list(runtime.generate(the_spec, [ask()]))

    sent = [one.headers["authorization"] for one in server.seen if one.path == CHAT]
    assert sent == ["Bearer old-key", "Bearer new-key"]
    assert runtime.num_loads(the_spec) == 1
    runtime.close()


def test_a_missing_key_variable_is_named(spec, monkeypatch):
    monkeypatch.delenv("BOX_KEY", raising=False)

    with pytest.raises(ServerError, match="BOX_KEY, which is not set"):
        run(spec(key_env="BOX_KEY"))


def test_no_proxy_of_the_environment_is_used_unless_asked_for(server, spec, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server.routes[CHAT] = good("x")

    assert run(spec())[0].text == "x"
    with pytest.raises(ServerError):
        run(spec(proxy_from_env=True))


def test_a_pool_spreads_a_list_and_leaves_out_a_server_that_is_down(server, spec):
    def act(connection, seen):
        good(seen.body["messages"][0]["content"])(connection, seen)

    with ScriptedServer({CHAT: act}) as second, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server.routes[CHAT] = act
        spec(name="second", url=second.url, max_concurrent=2)
        spec(name="down", url=f"http://127.0.0.1:{free.getsockname()[1]}")
        the_spec = spec(name="pool", pool=("second", "down"), max_concurrent=2)

        results = run(the_spec, *(ask(f"p{n}") for n in range(30)))

        assert [result.text for result in results] == [f"p{n}" for n in range(30)]
        counts = [len(one.bodies(CHAT)) for one in (server, second)]
        assert sum(counts) == 30
        assert min(counts) >= 1
        assert "Left out of the pool" in results[0].report["warnings"][0]


def test_a_server_that_leaves_a_pool_between_two_runs_costs_no_item(server, spec):
    def act(connection, seen):
        good(seen.body["messages"][0]["content"])(connection, seen)

    server.routes[CHAT] = act
    with ScriptedServer({CHAT: act}) as second:
        spec(name="second", url=second.url)
        the_spec, runtime = spec(pool=("second",)), Runtime()
        list(runtime.generate(the_spec, [ask("first run")]))
    requests = [ask(f"p{n}") for n in range(40)]

    collector = collect(runtime.generate(the_spec, requests), the_spec, requests)

    [resident] = runtime.residents()
    results = collector.results(resident.info, resident.bytes)
    assert [result.text for result in results] == [f"p{n}" for n in range(40)]
    runtime.close()


def test_a_busier_server_of_a_pool_is_asked_later(server, spec):
    def act(connection, seen):
        good("x")(connection, seen)

    busy = b'vllm:num_requests_running{e="0"} 5.0\nvllm:num_requests_waiting{e="0"} 7.0\n'
    with ScriptedServer({CHAT: act}) as second:
        server.routes |= {CHAT: act, "/metrics": reply(busy, 200, "text/plain")}
        spec(name="second", url=second.url)

        run(spec(pool=("second",)), ask())

        assert (len(server.bodies(CHAT)), len(second.bodies(CHAT))) == (0, 1)


def vllm_that_sleeps(order):
    """Routes of a vLLM in dev mode; what is asked of it is noted in `order`."""
    state = {"is_sleeping": False}

    def move(name, value):
        def act(connection, seen):
            order.append(name)
            state["is_sleeping"] = value
            reply({})(connection, seen)

        return act

    def answer(connection, seen):
        order.append("generate")
        good("x")(connection, seen)

    return {
        "/v1/models": reply(json.loads(json.dumps(MODELS).replace("scripted", "vllm"))),
        "/version": reply({"version": "0.32.0"}),
        "/is_sleeping": lambda connection, seen: reply(state)(connection, seen),
        "/sleep": move("sleep", True),
        "/wake_up": move("wake", False),
        CHAT: answer,
    }


def test_a_server_sleeps_when_its_model_is_let_go_and_wakes_for_the_next_run(server, spec):
    order = []
    server.routes |= vllm_that_sleeps(order)
    the_spec, runtime = spec(when_idle="sleep", gpu_bytes=7_000), Runtime()

    list(runtime.generate(the_spec, [ask()]))
    freed = runtime.unload(the_spec)
    list(runtime.generate(the_spec, [ask()]))
    runtime.close()

    assert order == ["generate", "sleep", "wake", "generate", "sleep"]
    assert freed == 7_000


class Ledger:
    """A room that notes what it is asked."""

    def __init__(self, order):
        self.order = order

    def reserve(self, spec, num_bytes):
        self.order.append(f"reserve {num_bytes}")

    def settle(self, spec):
        pass

    def release_cached(self):
        pass

    def can_free(self, spec):
        return None


def test_a_server_sleeps_when_others_need_the_card_and_wakes_once_there_is_room(server, spec):
    order = []
    server.routes |= vllm_that_sleeps(order)
    the_spec, runtime = spec(when_idle="sleep", gpu_bytes=7_000), Runtime(room=Ledger(order))

    list(runtime.generate(the_spec, [ask()]))
    freed = runtime.evict(the_spec)
    held_asleep = runtime.device_bytes(the_spec)
    list(runtime.generate(the_spec, [ask()]))

    assert order == ["reserve 0", "reserve 7000", "generate", "sleep", "reserve 7000", "wake", "generate"]
    assert (freed, held_asleep, runtime.device_bytes(the_spec)) == (7_000, 0, 7_000)
    runtime.close()


def test_a_server_without_sleep_warns_and_works(server, spec):
    server.routes[CHAT] = good("x")

    [result] = run(spec(when_idle="sleep"))

    assert result.text == "x"
    assert "no sleep endpoints" in result.report["warnings"][0]


def test_a_server_that_is_kept_is_never_put_to_sleep(server, spec):
    order = []
    server.routes |= vllm_that_sleeps(order)

    run(spec())

    assert order == ["generate"]


def test_closing_ends_the_thread_and_closing_again_does_nothing(server, spec):
    server.routes[CHAT] = good("x")
    before = set(threading.enumerate())
    runtime, the_spec = Runtime(), spec()
    list(runtime.generate(the_spec, [ask()]))

    with runtime.lease(the_spec) as engine:
        pass
    engine.close()
    engine.close()

    assert [one.name for one in threading.enumerate() if one not in before and "resident" in one.name] == []
