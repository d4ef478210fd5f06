"""Thinking through the whole loop, with the scripted engine: one character is one token."""

import dataclasses

import pytest

from runtime import Message, ModelSpec, Prompt, Request, Runtime, collect
from runtime.errors import GenerationFailed


def answer(reply, *, prompt=None, context_len=None, tokens_per_step=1, **fields):
    options = (("reply", reply), ("tokens_per_step", tokens_per_step))
    spec = ModelSpec(model="script", engine="scripted", context_len=context_len, options=options)
    requests = [Request(prompt=prompt or Prompt.of("x"), **fields)]
    runtime = Runtime()
    collector = collect(runtime.generate(spec, requests), spec, requests)
    resident = runtime.residents()[0]
    return collector.results(resident.info, resident.bytes)[0]


def test_thinking_has_its_own_text_and_the_report_has_all():
    result = answer("<think>why</think>\n\nbecause")

    assert (result.text, result.thinking_text) == ("because", "why")
    assert result.report["raw_text"] == "<think>why</think>\n\nbecause"


@pytest.mark.parametrize("size", [1, 3])
def test_a_spent_budget_closes_the_block_and_the_answer_follows(size):
    result = answer("<think>" + "t" * 50 + "</think>answer", thinking_budget=10, tokens_per_step=size)

    assert 10 <= result.report["thinking_closed_after"] < 10 + size
    assert set(result.thinking_text) == {"t"}
    assert len(result.thinking_text) < 20
    assert result.text.endswith("answer")
    assert result.report["finish"]["by"] == "token"


def test_thinking_below_its_budget_is_left_alone():
    result = answer("<think>tt</think>answer", thinking_budget=10)

    assert (result.text, result.thinking_text) == ("answer", "tt")
    assert "thinking_closed_after" not in result.report


def test_a_limit_inside_the_block_is_an_error_by_default():
    with pytest.raises(GenerationFailed, match="limit of 12 output tokens came before the thinking block closed"):
        answer("<think>" + "t" * 50, max_tokens=12)


@pytest.mark.parametrize(("on_cut", "text"), [("empty", ""), ("thinking", "ttttt")])
def test_a_limit_inside_the_block_gives_what_the_user_chose(on_cut, text):
    result = answer("<think>" + "t" * 50, max_tokens=12, on_cut_thinking=on_cut)

    assert (result.text, result.thinking_text) == (text, "ttttt")
    assert result.report["finish"] == {"reason": "length", "by": "max_tokens"}


def test_an_end_inside_the_block_is_told():
    result = answer("<think>why")

    assert (result.text, result.thinking_text) == ("", "why")
    assert result.report["warnings"] == ["The model ended inside its thinking block, so there is no answer behind it."]


def test_stop_strings_do_not_count_inside_thinking():
    prompt = dataclasses.replace(Prompt.of("x"), stop_strings=("STOP",))

    result = answer("<think>a STOP b</think>c STOP d", prompt=prompt)

    assert (result.text, result.thinking_text) == ("c ", "a STOP b")


def test_an_answer_is_cleaned_and_the_raw_text_kept():
    prompt = dataclasses.replace(Prompt.of("x"), clean=("quotes", "preamble", "fences"))

    result = answer('<think>hm</think>Here is your prompt:\n"a fox"', prompt=prompt)

    assert result.text == "a fox"
    assert result.report["cleaned"] == ["preamble", "quotes"]
    assert result.report["raw_text"].endswith('Here is your prompt:\n"a fox"')


def test_without_rules_an_answer_stays_as_it_is():
    result = answer(' "a fox" ')

    assert result.text == ' "a fox" '
    assert "cleaned" not in result.report


def test_dropped_history_is_told():
    turns = [Message.of(role, "w" * 40) for _ in range(3) for role in ("user", "assistant")]
    prompt = Prompt(messages=(*turns, Message.of("user", "last")), drop_history=True)

    result = answer("ok", prompt=prompt, context_len=200, max_tokens=10)

    assert result.text == "ok"
    assert result.report["warnings"] == ["4 of the oldest messages were dropped to fit the context of 200 tokens."]
