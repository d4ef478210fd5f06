import pytest

from runtime import Message, Prompt, Request
from runtime.engines.base import Capabilities, Encoded, EngineInfo
from runtime.errors import ContextOverflow
from runtime.prompting.length import fit, longer_context


def encode(prompt):
    """One token per character."""
    text = "".join(message.text for message in prompt.messages)
    return Encoded(prompt=prompt, token_ids=tuple(map(ord, text)), text=text)


def conversation(num_turns, **fields):
    """A system text of 10 tokens, then turns of 20 (the first is turn 0), then a question of 10."""
    turns = [Message.of(role, f"{n:010}") for n in range(num_turns) for role in ("user", "assistant")]
    messages = (Message.of("system", "s" * 10), *turns, Message.of("user", "question??"))
    return Prompt(messages=messages, **fields)


def test_a_request_that_does_not_fit_says_by_how_much():
    with pytest.raises(ContextOverflow, match=r"^Prompt of 61 tokens \+ max_tokens 4 is 1 over the context of 64\."):
        fit(encode, Request(prompt=Prompt.of("x" * 61), max_tokens=4), 64)


def test_a_prompt_of_context_plus_one_is_refused():
    with pytest.raises(ContextOverflow, match="Prompt of 65 tokens is 2 too long for the context of 64"):
        fit(encode, Request(prompt=Prompt.of("x" * 65)), 64)


def test_no_limit_is_all_that_fits():
    assert fit(encode, Request(prompt=Prompt.of("x" * 60)), 64)[1] == 4


@pytest.mark.parametrize("num_turns", range(9))
def test_no_more_of_the_oldest_turns_go_than_must(num_turns):
    prompt = conversation(num_turns, drop_history=True)

    encoded, max_tokens = fit(encode, Request(prompt=prompt, max_tokens=30), 100)

    dropped = max(0, num_turns - 2)  # 10 + 2 * 20 + 10 + 30 <= 100
    assert encoded.prompt.messages == (prompt.messages[0], *prompt.messages[1 + 2 * dropped :])
    assert max_tokens == 30
    note = f"{2 * dropped} of the oldest messages were dropped to fit the context of 100 tokens."
    assert encoded.notes == ((note,) if dropped else ())


def test_without_a_limit_room_for_an_answer_is_kept():
    encoded, max_tokens = fit(encode, Request(prompt=conversation(9, drop_history=True)), 100)

    assert (encoded.num_tokens, max_tokens) == (60, 40)


def test_what_does_not_fit_without_any_history_is_refused():
    with pytest.raises(ContextOverflow, match="Prompt of 20 tokens"):
        fit(encode, Request(prompt=conversation(3, drop_history=True), max_tokens=10), 19)


def test_history_stays_unless_the_user_lets_it_go():
    with pytest.raises(ContextOverflow, match="Prompt of 200 tokens"):
        fit(encode, Request(prompt=conversation(9), max_tokens=10), 100)


def test_what_only_a_server_can_count_is_left_to_it():
    request = Request(prompt=Prompt.of("x" * 900), max_tokens=7)

    assert fit(lambda prompt: Encoded(prompt=prompt, token_ids=None, text=""), request, 64)[1] == 7
    assert fit(encode, request, None)[1] == 7


def info(context_len, made_for, **capabilities):
    return EngineInfo(
        engine="e", model="m", context_len=context_len, device="-", dtype="-", attention="-", kv_cache="-",
        made_for=made_for, capabilities=Capabilities(**capabilities),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("info", "remedy"),
    [
        (info(64, 64), "Set max_tokens to 4 or less, or shorten the prompt."),
        (info(256, 200), "Set max_tokens to 4 or less, or shorten the prompt."),
        (info(64, 8192), "Set max_tokens to 4 or less, or load the model with a longer context, up to 8192."),
        (info(64, None), "Set max_tokens to 4 or less, or load the model with a longer context."),
        (info(64, None, is_remote=True), "Set max_tokens to 4 or less, or start the server with a longer context."),
    ],
)
def test_a_longer_context_is_advised_only_where_there_is_one(info, remedy):
    with pytest.raises(ContextOverflow) as caught:
        fit(encode, Request(prompt=Prompt.of("x" * 60), max_tokens=8), 64, longer_context(info))

    assert str(caught.value) == f"Prompt of 60 tokens + max_tokens 8 is 4 over the context of 64. {remedy}"


def test_a_prompt_over_the_longest_context_that_there_is_must_be_shorter():
    with pytest.raises(ContextOverflow, match=r"the answer\. Shorten the prompt\.$"):
        fit(encode, Request(prompt=Prompt.of("x" * 64)), 64, longer_context(info(64, 64)))
