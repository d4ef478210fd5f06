import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Message, Prompt
from runtime.prompting.prompter import Prompter
from tests.runtime.prompting.conftest import KINDS


@pytest.fixture(scope="module")
def prompters(model_folder):
    loaded = {}

    def get(kind):
        if kind not in loaded:
            loaded[kind] = Prompter.load(str(model_folder(kind)))
        return loaded[kind]

    return get


def texts(tokenizer, kind):
    """Random text, mixed with every added token and its halves."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    halves = [part for text in added for at in range(1, len(text)) for part in (text[:at], text[at:])]
    known = "abdeghiklmnorstux thinkendstart.!<>|_/[]0123456789"
    held = st.characters(exclude_categories=["Cs"])
    if kind == "smollm2":  # it has no tokens for some bytes, and loses what needs them
        held = held.filter(lambda char: tokenizer.decode(tokenizer.encode(char).ids) == char)
    letters = st.text(alphabet=known if kind == "unigram" else held, max_size=6)
    wide = st.sampled_from(added).map(lambda text: text.replace("<", "\uff1c").replace(">", "\uff1e"))
    spaces = st.sampled_from([" ", "  "] if kind == "unigram" else [" ", "  ", "\n", "\n\n", "\t", "\u200b"])
    pieces = st.one_of(st.sampled_from(added), st.sampled_from(halves), letters, spaces, wide)
    return st.lists(pieces, max_size=8).map("".join)


def segments(ids, control):
    """Ids between control tokens."""
    groups = itertools.groupby(ids, key=lambda one: one in control)
    return [list(group) for is_control, group in groups if not is_control]


def is_subsequence(short, long):
    rest = iter(long)
    return all(one in rest for one in short)


@pytest.mark.parametrize("num_cases", [100, pytest.param(2500, marks=pytest.mark.slow)])  # 10 000 over the four
@pytest.mark.parametrize("kind", KINDS)
def test_user_text_never_becomes_a_control_token_and_nothing_of_it_is_lost(kind, num_cases, prompters):
    prompter = prompters(kind)
    tokenizer = prompter._tokenizer
    control = {one: token.content for one, token in tokenizer.get_added_tokens_decoder().items()}
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    unk = tokenizer.token_to_id("<unk>")
    has_prefix = kind in ("unigram", "sentencepiece")
    turns = ("system", "user", "assistant", "user")
    normal = tokenizer.normalizer.normalize_str if kind in ("qwen3", "unigram") else str

    @settings(max_examples=num_cases, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.tuples(*[texts(tokenizer, kind)] * 4), texts(tokenizer, kind))
    def check(contents, prefix):
        contents = ["x" + content + "." for content in contents]
        messages = tuple(Message.of(role, text) for role, text in zip(turns, contents))

        encoded = prompter.encode(Prompt(messages=messages, template="chatml", answer_prefix=prefix))

        written = [one for one in encoded.token_ids if one in control and one != unk]
        assert written == [start, end] * 4 + [start]
        assert all(content in encoded.text for content in contents)
        expected = [f"{role}\n{text}" for role, text in zip(turns, contents)] + [f"assistant\n{prefix}"]
        got = [tokenizer.decode(ids, skip_special_tokens=False) for ids in segments(encoded.token_ids, {start, end})]
        got = [text for text in got if text.strip() not in ("", "<unk>")]
        if kind == "unigram":
            expected = [text.replace("\n", "<unk>") for text in expected]
        assert [normal(text) for text in got] == [normal(text) for text in expected]
        if not has_prefix:
            full = tokenizer.encode(encoded.text, add_special_tokens=False).ids
            assert is_subsequence([one for one in full if one not in control], encoded.token_ids)

    check()
