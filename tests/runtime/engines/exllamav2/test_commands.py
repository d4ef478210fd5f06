"""Closing, dropping and feeding a request while it runs."""

import random
from types import SimpleNamespace

import pytest

from runtime import Sampling
from runtime.engines.base import DecodeStep, Drop, Feed
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.engines.exllamav2.asking import LONG, PROMPT, free_pages, ids_of, run, text_of, work


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_closing_frees_every_page_and_the_next_text_is_as_if_it_had_never_been(open_engine, num_steps):
    engine = open_engine(context_len=2048)
    steps = engine.generate([work(engine, LONG, 100), work(engine, PROMPT, 100)])
    for _ in range(num_steps):
        next(steps)

    steps.close()

    assert engine._generator.num_remaining_jobs() == 0
    assert free_pages(engine) == engine._generator.max_pages
    [after] = run(engine, work(engine, LONG, 30)).values()
    assert ids_of(after) == cpu.manual(LONG, 30)


def test_a_dropped_request_goes_and_the_others_stay(open_engine):
    engine = open_engine()

    out = run(engine, work(engine, PROMPT, 30), work(engine, [8, 9], 30), commands={(0, 3): Drop()})

    assert len(ids_of(out[0])) == 3
    assert ids_of(out[1]) == cpu.manual([8, 9], 30)
    assert free_pages(engine) == engine._generator.max_pages


@pytest.mark.parametrize("draft", [(), (("draft", "ngram"),)])
def test_fed_ids_come_back_and_the_model_goes_on_from_them(open_engine, draft):
    engine = open_engine(options=draft)
    fed = (120, 121, 122)

    out = run(engine, work(engine, LONG[:500], 20), work(engine, PROMPT, 20), commands={(0, 4): Feed(token_ids=fed)})

    at = sum(len(step.token_ids) for step in [s for s in out[0] if isinstance(s, DecodeStep)][:4])
    assert ids_of(out[0]) == cpu.manual(LONG[:500], 20, forced={at + i: one for i, one in enumerate(fed)})
    assert text_of(out[0]) == cpu.Detokenizer().push(ids_of(out[0]))
    assert ids_of(out[1]) == cpu.manual(PROMPT, 20)


def test_feeding_computes_only_what_is_new(open_engine):
    engine = open_engine()
    model = engine._parts.model
    seen = []
    original = model.forward_chunk
    model.forward_chunk = lambda **call: (seen.append(call["input_ids"].shape[1]), original(**call))[1]

    run(engine, work(engine, LONG[:520], 8), commands={(0, 3): Feed(token_ids=(1, 2))})

    assert sum(seen) < 2 * 520 - 256


def test_fed_ids_that_fill_the_limit_end_the_request_exactly(open_engine):
    engine = open_engine()

    [steps] = run(engine, work(engine, PROMPT, 6), commands={(0, 4): Feed(token_ids=(1, 2, 3, 4))}).values()

    assert ids_of(steps) == [*cpu.manual(PROMPT, 4), 1, 2]
    assert steps[-1].finish.reason == "length"
    assert engine._generator.num_remaining_jobs() == 0


def test_the_random_numbers_go_on_after_a_feed(open_engine):
    engine = open_engine()
    drawn = Sampling(temperature=3.0)
    [plain] = run(engine, work(engine, PROMPT, 12, sampling=drawn, seed=5)).values()
    again = ids_of(plain)[4:6]

    [fed] = run(
        engine, work(engine, PROMPT, 12, sampling=drawn, seed=5), commands={(0, 4): Feed(token_ids=tuple(again))}
    ).values()

    numbers = random.Random(5)
    draws = [numbers.random() for _ in range(12)]
    assert ids_of(fed)[:6] == ids_of(plain)[:6]
    ids = [*PROMPT, *ids_of(fed)[:6]]
    expected = cpu.draw(cpu.next_logits(ids), SimpleNamespace(temperature=3.0, top_k=0, top_p=1, min_p=0), draws[4])
    assert ids_of(fed)[6] == expected
