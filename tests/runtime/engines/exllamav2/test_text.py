"""What ExLlamaV2 writes: the text of a manual loop, whatever is drafted, stopped or answered beside it."""

import random

import pytest
import torch

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime, Sampling, collect
from runtime.engines.base import PrefillStep
from runtime.engines.exllamav2_jobs import settings_for
from runtime.events import PrefillProgress
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.engines.exllamav2.asking import LONG, PROMPT, ids_of, run, text_of, work


def test_greedy_is_the_manual_loop(open_engine):
    engine = open_engine()

    [steps] = run(engine, work(engine, PROMPT)).values()

    assert ids_of(steps) == cpu.manual(PROMPT, 16)
    assert text_of(steps) == cpu.Detokenizer().push(cpu.manual(PROMPT, 16))
    assert (steps[-1].finish.reason, steps[-1].finish.by) == ("length", "max_tokens")
    assert steps[0] == PrefillStep(num_done=5, num_total=5, num_cached=0)


def test_a_list_gives_what_single_requests_give(open_engine):
    engine = open_engine(context_len=4096)
    prompts = [PROMPT, LONG[:300], [9], LONG[3:40], [1, 2, 3]]

    together = run(engine, *(work(engine, ids, 20 + at) for at, ids in enumerate(prompts)))

    for at, ids in enumerate(prompts):
        assert ids_of(together[at]) == cpu.manual(ids, 20 + at)
    assert engine._generator.num_remaining_jobs() == 0


def test_a_stop_id_ends_the_text_and_is_not_in_it(open_engine):
    expected = cpu.manual(PROMPT, 16)
    engine = open_engine(stop_ids=(expected[7],))
    at = expected.index(expected[7])

    [steps] = run(engine, work(engine, PROMPT)).values()

    assert ids_of(steps) == expected[: at + 1]
    assert text_of(steps) == cpu.Detokenizer().push(expected[:at])
    assert steps[-1].finish.as_dict() == {
        "reason": "stop",
        "by": "token",
        "id": expected[at],
        "text": f"<{expected[at]}>",
    }


def test_ids_that_the_sdk_withheld_until_the_stop_id_are_not_lost(open_engine, monkeypatch):
    expected = cpu.manual(PROMPT, 16)
    engine = open_engine(stop_ids=(expected[7],))
    monkeypatch.setattr(cpu.Job, "hold", staticmethod(lambda new: new > 3))
    at = expected.index(expected[7])

    [steps] = run(engine, work(engine, PROMPT)).values()

    assert ids_of(steps) == expected[: at + 1]


def test_without_a_stop_id_nothing_stops_before_the_limit(open_engine):
    engine = open_engine()

    [steps] = run(engine, work(engine, PROMPT, 300)).values()

    assert ids_of(steps) == cpu.manual(PROMPT, 300)


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
@pytest.mark.parametrize("max_tokens", [1, 2, 9, 40])
def test_drafting_changes_neither_text_nor_length(open_engine, num_draft_tokens, max_tokens):
    engine = open_engine(options=(("draft", "ngram"), ("num_draft_tokens", num_draft_tokens)))
    prompt = [3, 4] * 20

    [steps] = run(engine, work(engine, prompt, max_tokens)).values()

    assert ids_of(steps) == cpu.manual(prompt, max_tokens)
    draft = steps[-1].details["draft"]
    assert draft["kind"] == "ngram"
    assert 0 <= draft["num_accepted_tokens"] <= draft["num_drafted_tokens"]


def test_a_drafted_request_may_fill_the_context_to_its_last_token(open_engine):
    engine = open_engine(context_len=512, options=(("draft", "ngram"),))

    [steps] = run(engine, work(engine, LONG[:400], 112)).values()

    assert ids_of(steps) == cpu.manual(LONG[:400], 112)
    assert steps[-1].finish.by == "context"


def test_the_neutral_settings_are_neutral_and_greedy_draws_nothing(sdk):
    neutral, greedy = settings_for(sdk, Sampling()), settings_for(sdk, GREEDY)

    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (1.0, 0, 1.0, 0.0)
    assert neutral.token_repetition_penalty == greedy.token_repetition_penalty == 1.0
    assert greedy.top_k == 1


def test_a_seed_is_private(open_engine):
    engine = open_engine()
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    [first] = run(engine, work(engine, PROMPT, sampling=Sampling(), seed=7)).values()
    [second] = run(engine, work(engine, PROMPT, sampling=Sampling(), seed=7)).values()
    [other] = run(engine, work(engine, PROMPT, sampling=Sampling(), seed=8)).values()

    assert ids_of(first) == ids_of(second) != ids_of(other)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()


def test_through_the_runtime_a_stop_string_ends_the_request_at_once(open_engine):
    engine = open_engine()
    expected = cpu.manual(PROMPT, 40)
    stop = cpu.Detokenizer().push(expected[9:11])
    prompt = Prompt(messages=Prompt.of(" ".join(map(str, PROMPT))).messages, stop_strings=(stop,))
    request = Request(prompt=prompt, sampling=GREEDY, max_tokens=40)

    def load(spec):
        yield from ()
        return engine

    runtime, spec = Runtime(load=load), ModelSpec(model="m")
    events = list(runtime.generate(spec, [request]))
    [result] = collect(events, spec, [request]).results(engine.info, engine.bytes)

    assert result.text == cpu.Detokenizer().push(expected[:9])
    assert result.report["num_output_tokens"] == 11
    assert any(isinstance(event, PrefillProgress) for event in events)
    assert engine._generator.num_remaining_jobs() == 0
