import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Message, Prompt
from runtime.errors import TemplateFailed
from runtime.prompting.control_tokens import ControlTokens
from tests.runtime.prompting.kinds import KINDS, sentencepiece

TURNS = ("system", "user", "assistant", "user")
PREFIXED = ("unigram", "sentencepiece")
"""These put a space before the text behind an added token."""


def pieces_of(tokenizer, kind):
    """What user texts are made of: every added token, its halves, its wide twin, white space, characters."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    halves = [part for text in added for at in range(1, len(text)) for part in (text[:at], text[at:])]
    wide = [text.translate({ord("<"): "\uff1c", ord(">"): "\uff1e"}) for text in added]
    if kind == "unigram":  # other characters are unknown to it
        return added, halves, wide, [" ", "  "], list("abdeghiklmnorstuxINST!<>|_/[]0123456789.")
    spaces = [" ", "  ", "\n", "\n\n", "\t", "\u200b", "\r\n"]
    return added, halves, wide, spaces, list("aZ09<>|/[]_\u00e9\u0338\u4f60\U0001f3a8\ue000\x1b\ufffd\u212a")


class Checks:
    """What must hold for each prompt of one tokenizer."""

    def __init__(self, prompter, kind):
        self.prompter, self.kind, self.tokenizer = prompter, kind, prompter._tokenizer
        self.added = self.tokenizer.get_added_tokens_decoder()
        self.unk = self.tokenizer.token_to_id("<unk>")
        self.start, self.end = map(self.tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>"))
        self.normal = self.tokenizer.normalizer.normalize_str if kind in ("qwen3", "unigram") else str

    def keeps(self, char):
        """Whether the tokenizer can hold a character at all: SmolLM2 has no tokens for some bytes."""
        ids = self.tokenizer.encode(f"x{char}x").ids
        return self.kind == "unigram" or self.normal(self.tokenizer.decode(ids)) == self.normal(f"x{char}x")

    def check(self, contents, prefix):
        contents = [f"x{content}." for content in contents]
        messages = tuple(Message.of(role, text) for role, text in zip(TURNS, contents))

        encoded = self.prompter.encode(Prompt(messages=messages, template="chatml", answer_prefix=prefix))

        control = [one for one in encoded.token_ids if one in self.added and one != self.unk]
        assert control == [self.start, self.end] * 4 + [self.start]
        assert all(content in encoded.text for content in contents)
        self._check_round_trip(encoded.token_ids, contents, prefix)
        if self.kind not in PREFIXED:
            whole = self.tokenizer.encode(encoded.text, add_special_tokens=False).ids
            others = iter(encoded.token_ids)
            assert all(one in others for one in whole if one not in self.added)  # all are there, in this order

    def _check_round_trip(self, ids, contents, prefix):
        expected = [f"{role}\n{text}" for role, text in zip(TURNS, contents)] + [f"assistant\n{prefix}"]
        if self.kind == "unigram":
            expected = [text.replace("\n", "<unk>") for text in expected]
        groups = itertools.groupby(ids, key=lambda one: one in (self.start, self.end))
        texts = [
            self.tokenizer.decode(list(group), skip_special_tokens=False)
            for is_control, group in groups
            if not is_control
        ]
        between = [text for text in texts if text.strip() not in ("", "<unk>")]
        assert list(map(self.normal, between)) == list(map(self.normal, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_no_user_text_becomes_a_control_token_and_none_of_it_is_lost(kind, prompters):
    checks = Checks(prompters(kind), kind)
    added, halves, wide, spaces, _ = pieces_of(checks.tokenizer, kind)
    letters = (
        st.sampled_from("abdeghiklmnorstux!<>|_/[]01")
        if kind == "unigram"
        else st.characters(exclude_categories=["Cs"])
    )
    pieces = st.one_of(*map(st.sampled_from, (added, halves, wide, spaces)), letters.filter(checks.keeps))
    texts = st.lists(pieces, max_size=8).map("".join)

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.tuples(texts, texts, texts, texts), texts)
    def holds(contents, prefix):
        checks.check(contents, prefix)

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_for_2500_prompts_of_each_tokenizer(kind, prompters):
    checks = Checks(prompters(kind), kind)
    *tokens, spaces, letters = pieces_of(checks.tokenizer, kind)
    pieces = [*tokens, list(filter(checks.keeps, spaces)), list(filter(checks.keeps, letters))]
    draw = random.Random(7)

    def text():
        return "".join(draw.choice(draw.choice(pieces)) for _ in range(draw.randrange(9)))

    for _ in range(2500):
        checks.check([text() for _ in TURNS], text())


@pytest.mark.parametrize("kind", KINDS)
def test_every_added_token_by_itself_stays_text(kind, prompters):
    checks = Checks(prompters(kind), kind)

    for token in checks.added.values():
        checks.check([token.content] * 4, token.content)


def test_two_messages_cannot_join_into_a_control_token(prompters):
    prompter = prompters("qwen3")
    joined = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    messages = tuple(Message.of(role, text) for role, text in zip(TURNS, ("a<|im_", "end|>b", "<th", "ink>")))

    encoded = prompter.encode(Prompt(messages=messages, template=joined))

    assert encoded.text == "a<|im_end|>b<think><|im_end|>"
    end = prompter._tokenizer.token_to_id("<|im_end|>")
    assert [one for one in encoded.token_ids if one in prompter._added] == [end]
    assert prompter._tokenizer.decode(encoded.token_ids, skip_special_tokens=False) == encoded.text


def test_a_template_that_takes_text_away_cannot_uncover_a_control_token(prompters):
    prompter = prompters("qwen3")

    encoded = prompter.encode(
        Prompt(messages=Prompt.of("<|imX_end|>").messages, template="{{ messages[0].content | replace('X', '') }}")
    )

    assert encoded.text == "<|im_end|>"
    assert not set(encoded.token_ids) & set(prompter._added)


def test_user_text_cannot_take_a_control_token_of_the_template_along(prompters):
    """`[INST]` behind a `<|im_end|>` that the user's last characters would turn into another token."""
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens(["!<|im_"])
    control = ControlTokens(tokenizer)

    text, ids = control.encode(lambda mark: mark("hello!") + "<|im_end|>", ["hello!"], "<|im_end|>")

    assert text == "hello!<|im_end|>"
    assert [one for one in ids if one in control.texts] == [tokenizer.token_to_id("<|im_end|>")]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_packs_own_closing_of_a_block_goes_by_id(prompters):
    prompter = prompters("qwen3")

    encoded = prompter.encode(Prompt.of("What does </think> mean?"))

    close = prompter._tokenizer.token_to_id("</think>")
    assert close not in encoded.token_ids
    assert encoded.reasoning.close_ids.count(close) == 1
    assert prompter._tokenizer.decode(encoded.reasoning.close_ids, skip_special_tokens=False) == "\n</think>\n\n"


def test_a_long_prompt_full_of_control_tokens_is_encoded_in_one_pass(prompters):
    """Work that grew with the square of the length took minutes here."""
    prompter = prompters("smollm2")
    text = "words <|im_end|> and < more, " * 4000

    encoded = prompter.encode(Prompt.of(text))

    assert [one for one in encoded.token_ids if one in prompter._added] == [1, 2, 1, 2, 1]
    assert text in prompter._tokenizer.decode(encoded.token_ids, skip_special_tokens=False)


def test_half_a_character_is_told_with_its_place(prompters):
    with pytest.raises(TemplateFailed, match=r"half a character \(U\+D83C\) at position 3"):
        prompters("smollm2").encode(Prompt.of("ab\ud83c"))
