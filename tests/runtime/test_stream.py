import itertools

import pytest

from runtime import ModelSpec, Prompt, Request, Runtime, collect
from runtime.engines.base import DecodeStep, Encoded, EngineInfo, WaitStep
from runtime.errors import ContextOverflow, GenerationFailed
from runtime.events import Failed, Finish, Finished, Started, TextDelta, Waiting
from runtime.stream import stream


def run(spec, *requests):
    runtime = Runtime()
    events = list(runtime.generate(spec, requests))
    return runtime, events


def spec(**options):
    context_len = options.pop("context_len", None)
    return ModelSpec(model="script", engine="scripted", context_len=context_len, options=tuple(options.items()))


def ask(text, **fields):
    prompt = {key: fields.pop(key) for key in ("stop_strings", "thinking") if key in fields}
    return Request(prompt=Prompt(messages=Prompt.of(text).messages, **prompt), **fields)


def results(the_spec, *requests):
    runtime, events = run(the_spec, *requests)
    collector = collect(events, the_spec, requests)
    resident = runtime.residents()[0]
    return collector.results(resident.info, resident.bytes)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_the_text_does_not_depend_on_how_it_was_cut(size):
    [result] = results(spec(reply="one two STOP three", tokens_per_step=size), ask("x", stop_strings=("STOP",)))

    assert result.text == "one two "
    assert result.report["finish"] == {"reason": "stop", "by": "string", "text": "STOP"}


def test_a_batch_gives_its_events_in_order_for_each_request():
    _, events = run(spec(), ask("a"), ask("b"))

    for index in (0, 1):
        mine = [e for e in events if getattr(e, "index", None) == index]
        assert isinstance(mine[0], Started)
        assert isinstance(mine[-1], Finished)
        assert "".join(e.text for e in mine if isinstance(e, TextDelta)) == f"You said: {'ab'[index]}"


def test_a_prompt_over_the_context_fails_alone():
    the_spec = spec(context_len=64)
    _, events = run(the_spec, ask("x" * 100), ask("b", max_tokens=4))

    failed = [e for e in events if isinstance(e, Failed)]
    assert [e.index for e in failed] == [0]
    assert isinstance(failed[0].error, ContextOverflow)
    with pytest.raises(ContextOverflow, match=r"^Item 1 of 2 failed: Prompt of .* \(1 of 2 items finished\.\)$"):
        results(the_spec, ask("x" * 100), ask("b", max_tokens=4))


def test_closing_the_stream_closes_the_engine_and_frees_the_lease():
    runtime, the_spec = Runtime(), spec()
    events = runtime.generate(the_spec, [ask("hello")])
    list(itertools.islice(events, 6))

    events.close()

    with runtime.lease(the_spec) as engine:
        assert engine.num_live == 0


def test_equal_specs_share_one_load_and_unload_frees():
    runtime = Runtime()
    list(runtime.generate(spec(), [ask("a")]))
    list(runtime.generate(spec(), [ask("b")]))

    assert runtime.num_loads(spec()) == 1
    assert runtime.unload() == 1000
    assert runtime.residents() == []


def test_a_length_limit_is_exact_and_named():
    [result] = results(spec(reply="x" * 50), ask("x", max_tokens=7))

    assert result.text == "x" * 7
    assert result.report["finish"] == {"reason": "length", "by": "max_tokens"}
    assert result.report["num_output_tokens"] == 7


def test_64_silent_steps_show_a_warning():
    [result] = results(spec(reply=" " * 100 + "x"), ask("x"))

    assert any("64 steps" in warning for warning in result.report["warnings"])


def test_a_step_that_fails_raises_its_own_sentence():
    with pytest.raises(GenerationFailed, match="step 3"):
        results(spec(fail_at=3), ask("x"))


class Slow:
    """An engine that has nothing to say at first."""

    info = EngineInfo(engine="slow", model="m", context_len=64, device="", dtype="", attention="", kv_cache="")

    def encode(self, prompt):
        return Encoded(prompt=prompt, token_ids=(1,), text="x")

    def generate(self, batch):
        yield 0, WaitStep(what="the server", waited_s=0.2)
        yield 0, DecodeStep(text="hi", token_ids=(5, 0), finish=Finish(reason="stop", by="token", id=0))


def test_an_engine_that_waits_gives_signs_of_life_and_no_text():
    events = list(stream(Slow(), [ask("x")]))

    assert [e for e in events if isinstance(e, Waiting)] == [Waiting(index=0, what="the server", waited_s=0.2)]
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["hi"]
