"""Requests that fail alone."""

from dataclasses import replace

from runtime.engines.base import FailedStep
from runtime.errors import GenerationFailed
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.engines.exllamav2.asking import LONG, PROMPT, free_pages, ids_of, run, work


def test_logits_that_are_not_finite_fail_their_request_alone_and_say_where(open_engine):
    engine = open_engine()
    engine._parts.model.nan_after = [8, 9, *cpu.manual([8, 9], 3)]

    out = run(engine, work(engine, PROMPT), work(engine, [8, 9]), work(engine, [77]))

    assert ids_of(out[0]) == cpu.manual(PROMPT, 16)
    assert ids_of(out[2]) == cpu.manual([77], 16)
    assert ids_of(out[1]) == cpu.manual([8, 9], 3)
    assert isinstance(out[1][-1], FailedStep)
    sentence = str(out[1][-1].error)
    assert sentence.startswith("ExLlamaV2 with flash_attention_2: non-finite logits at output token 4.")
    assert free_pages(engine) == engine._generator.max_pages


def test_pages_with_spoilt_values_are_not_used_again(open_engine):
    engine = open_engine()
    engine._parts.model.nan_after = LONG[:600]
    run(engine, work(engine, LONG[:600]))
    engine._parts.model.nan_after = None

    [steps] = run(engine, work(engine, LONG[:600])).values()

    assert steps[-1].details["num_cached_tokens"] == 0


def test_a_forward_pass_that_fails_costs_only_the_request_that_fails_alone(open_engine):
    engine = open_engine()
    engine._parts.model.poison = 150

    out = run(engine, work(engine, PROMPT), work(engine, [8, 150, 9]), work(engine, [77]))

    assert ids_of(out[0]) == cpu.manual(PROMPT, 16)
    assert ids_of(out[2]) == cpu.manual([77], 16)
    assert [type(step) for step in out[1]] == [FailedStep]
    assert isinstance(out[1][0].error, GenerationFailed)
    assert "illegal memory access" in str(out[1][0].error)
    assert free_pages(engine) == engine._generator.max_pages


def test_a_prompt_of_no_tokens_fails_alone(open_engine):
    engine = open_engine()
    whole = work(engine, PROMPT)
    empty = replace(whole, encoded=replace(whole.encoded, token_ids=()))

    out = run(engine, empty, whole)

    assert [type(step) for step in out[0]] == [FailedStep]
    assert isinstance(out[0][0].error, GenerationFailed)
    assert ids_of(out[1]) == cpu.manual(PROMPT, 16)
