import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from runtime import Prompt
from runtime.prompting.detokenize import Detokenizer
from tests.runtime.prompting.kinds import KINDS

SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def cut(ids, at):
    """The ids in pieces, cut at these places."""
    places = [0, *sorted(place % (len(ids) + 1) for place in at), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(places)]


def streamed(detokenizer, pieces):
    return [*map(detokenizer.push, pieces), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_equals_the_whole_text_however_it_is_cut(kind, prompters):
    tokenizer = prompters(kind)._tokenizer

    @SETTINGS
    @given(st.text(max_size=30), st.lists(st.integers(min_value=0), max_size=8))
    def holds(text, at):
        ids = tokenizer.encode(text, add_special_tokens=False).ids

        parts = streamed(Detokenizer(tokenizer), cut(ids, at))

        assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=False)

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_give_the_same_text_however_they_are_cut(kind, prompters):
    tokenizer = prompters(kind)._tokenizer
    size = tokenizer.get_vocab_size()

    @SETTINGS
    @given(st.lists(st.integers(0, size + 5), max_size=30), st.lists(st.integers(min_value=0), max_size=8))
    def holds(ids, at):
        whole = tokenizer.decode(ids, skip_special_tokens=False)

        one_by_one = "".join(streamed(Detokenizer(tokenizer), [[one] for one in ids]))

        assert "".join(streamed(Detokenizer(tokenizer), cut(ids, at))) == one_by_one
        if kind != "sentencepiece" or "\ufffd" not in whole:  # a broken run of byte tokens is all U+FFFD there
            assert one_by_one == whole

    holds()


@pytest.mark.parametrize("kind", ["smollm2", "qwen3", "sentencepiece"])
def test_an_incomplete_character_is_never_shown(kind, prompters):
    tokenizer = prompters(kind)._tokenizer
    text = "".join(random.Random(3).choice("a \u00e9\u4f60\U0001f3a8\U0001f469\u200d\U0001f680") for _ in range(200))
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    parts = streamed(Detokenizer(tokenizer), [[one] for one in ids])

    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert parts[-1] == ""


def test_what_is_incomplete_at_the_end_is_told_by_flush(prompters):
    tokenizer = prompters("smollm2")._tokenizer
    ids = tokenizer.encode("\U0001f3a8").ids
    detokenizer = Detokenizer(tokenizer)

    assert [detokenizer.push(ids[:-1]), detokenizer.flush()] == ["", "\ufffd"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_space_of_a_text_goes_where_the_tokenizer_had_put_one(kind, prompters):
    tokenizer = prompters(kind)._tokenizer
    ids = tokenizer.encode("a cat sat", add_special_tokens=False).ids

    parts = streamed(Detokenizer(tokenizer), [[one] for one in ids])

    assert "".join(parts) == "a cat sat"


def test_control_tokens_give_no_text_and_marks_of_thinking_do(prompters):
    prompter = prompters("qwen3")
    ids = prompter._tokenizer.encode("<think>a</think>b<|im_start|>c<|im_end|>").ids

    text = "".join(streamed(prompter.detokenizer(), [[one] for one in ids]))

    assert text == "<think>a</think>bc"


def test_work_per_id_does_not_grow_with_the_text():
    """Counted, not timed: each id is looked up once."""

    class Counting:
        decoder = None
        looked_up = 0

        def __init__(self, tokenizer):
            self._tokenizer, self.decoder = tokenizer, tokenizer.decoder

        def id_to_token(self, one):
            self.looked_up += 1
            return self._tokenizer.id_to_token(one)

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    counting = Counting(tokenizer)
    detokenizer = Detokenizer(counting)

    text = "".join(detokenizer.push([one % 2]) for one in range(5000))

    assert (len(text), counting.looked_up) == (5000, 5000)


def test_a_decoder_of_another_kind_is_streamed_too():
    words = {"hello": 0, "##world": 1, "again": 2, "!": 3}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="!"))
    tokenizer.decoder = decoders.WordPiece()
    ids = [0, 1, 2, 0, 1, 1, 2, 3, 0] * 3

    assert "".join(streamed(Detokenizer(tokenizer), [[one] for one in ids])) == tokenizer.decode(ids)


def test_an_answer_that_goes_on_from_a_prefix_keeps_its_space(prompters):
    prompter = prompters("sentencepiece")
    encoded = prompter.encode(Prompt(messages=Prompt.of("x").messages, answer_prefix="A photo of"))
    ids = prompter._tokenizer.encode("a cat", add_special_tokens=False).ids

    assert prompter.detokenizer(encoded).push(ids) == " a cat"
    assert prompter.detokenizer().push(ids) == "a cat"
