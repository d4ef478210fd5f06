from types import SimpleNamespace

import pytest

from runtime.benchmark.prompts import prompt_of_length, quality_prompts


def encode_by(size):
    """An encoder that takes a token for each `size` characters, and 10 for the template."""

    def encode(prompt):
        return SimpleNamespace(num_tokens=10 + -(-len(prompt.messages[-1].text) // size))

    return encode


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [64, 65, 511, 4096])
def test_a_prompt_has_exactly_the_length_asked_for(size, num_tokens):
    encode = encode_by(size)

    prompt = prompt_of_length(encode, num_tokens, seed=7)

    assert encode(prompt).num_tokens == num_tokens


def test_another_seed_differs_from_the_first_words_on():
    first, second = (prompt_of_length(encode_by(4), 100, seed=seed).messages[0].text for seed in (1, 2))

    assert first.split()[:2] != second.split()[:2]


def test_a_length_under_the_template_is_refused_with_numbers():
    with pytest.raises(ValueError, match=r"about \d+ tokens, which is over the length of 8"):
        prompt_of_length(encode_by(4), 8, seed=0)


def test_an_engine_that_does_not_tell_its_ids_gets_a_word_for_each_token():
    prompt = prompt_of_length(lambda _: SimpleNamespace(num_tokens=None), 100, seed=0)

    assert len(prompt.messages[0].text.split()) == 100


def test_the_quality_set_is_25_prompts_of_five_kinds_five_each():
    kinds = [one.kind for one in quality_prompts()]

    assert len(kinds) == 25
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("image", "code", "mathematics", "chinese", "long"), 5
    )
