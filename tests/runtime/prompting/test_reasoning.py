import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engines.base import Reasoning
from runtime.prompting.reasoning import CHANNELS, find_tags, splitter

THINK = ("<think>", "</think>")


def split(text, *, tags=THINK, is_open=False, size=None):
    """(thinking, answer, still open) of a text pushed in pieces of one size."""
    one = splitter(Reasoning(open_tag=tags[0], close_tag=tags[1], is_open=is_open))
    step = size or len(text) or 1
    parts = [part for at in range(0, len(text), step) for part in one.push(text[at : at + step])] + one.flush()
    return (
        "".join(text for channel, text in parts if channel == "thinking"),
        "".join(text for channel, text in parts if channel == "answer"),
        one.is_open,
    )


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("answer</think>", False, ("", "answer</think>", False)),
        ("<think>a</think>b", False, ("a", "b", False)),
        ("</think>b", False, ("", "</think>b", False)),
        ("</think>b", True, ("", "b", False)),
        ("a</think>b", True, ("a", "b", False)),
        ("<think>a", False, ("a", "", True)),
        ("<think>a</thi", False, ("a</thi", "", True)),
        ("a", True, ("a", "", True)),
        ("<think>a</think>b<think>c</think>d", False, ("ac", "bd", False)),
        ("<think></think>b", False, ("", "b", False)),
        ("b ```\n<think>x</think>\n``` c", False, ("x", "b ```\n\n``` c", False)),
        ("b\n```xml\n<think>x</think>\n```\nc", False, ("", "b\n```xml\n<think>x</think>\n```\nc", False)),
        ("b\n```\n<think>\n```\n<think>x</think>c", False, ("x", "b\n```\n<think>\n```\nc", False)),
        ("Write `<think>` first.", False, ("", "Write `<think>` first.", False)),
        ("<think>```\nx</think>b", False, ("```\nx", "b", False)),
        ("no thinking < here <thin", False, ("", "no thinking < here <thin", False)),
        ("", True, ("", "", True)),
    ],
)
def test_the_block_is_followed_from_where_it_opened(text, is_open, expected, size):
    assert split(text, is_open=is_open, size=size) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "a", "`", "```", "\n", " "]), max_size=12), st.booleans()
)
def test_no_character_is_lost_but_the_tags(pieces, is_open):
    text = "".join(pieces)
    one = splitter(Reasoning(open_tag=THINK[0], close_tag=THINK[1], is_open=is_open))

    passed = "".join(part for _, part in one.push(text) + one.flush())

    pattern = "".join(f"(?:{part})?" if part in THINK else re.escape(part) for part in re.split("(</?think>)", text))
    assert re.fullmatch(pattern, passed)


@given(st.text(alphabet="<>/think`\n ", max_size=40), st.integers(1, 7), st.booleans())
def test_any_cut_gives_the_same(text, size, is_open):
    assert split(text, is_open=is_open, size=size) == split(text, is_open=is_open)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}think<|end|><|start|>assistant{FINAL}answer", ("think", "answer", False)),
        (f"{FINAL}answer", ("", "answer", False)),
        ("answer", ("", "answer", False)),
        (f"{ANALYSIS}cut", ("cut", "", True)),
        (f"{ANALYSIS}a<|end|>", ("a", "", True)),
        ("<|channel|>ana", ("", "", True)),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|><|start|>assistant{FINAL}c", ("ab", "c", False)),
        (
            "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{}<|call|>",
            ("{}", "", True),
        ),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|message|>b", ("a", "b", False)),
        (f"{FINAL}tags such as <think> are text", ("", "tags such as <think> are text", False)),
    ],
)
def test_channels_tell_thinking_from_the_answer(text, expected, size):
    assert split(text, tags=CHANNELS, size=size) == expected


def test_custom_tags_are_followed_as_typed():
    assert split("[[why]]a[[so]]b", tags=("[[why]]", "[[so]]"), size=2) == ("a", "b", False)


@pytest.mark.parametrize(
    ("template", "added", "expected"),
    [
        ("", ["<think>", "</think>", "<|im_end|>"], THINK),
        ("{{ '<think>' }}{{ '</think>' }}", [], THINK),
        ("", ["[THINK]", "[/THINK]"], ("[THINK]", "[/THINK]")),
        ("", ["<|start|>", "<|end|>", "<|channel|>", "<|message|>"], CHANNELS),
        ("nothing", [], THINK),
    ],
)
def test_a_models_marks_are_found_in_its_tokens_or_its_template(template, added, expected):
    assert find_tags(template, added) == expected
