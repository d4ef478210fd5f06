import pytest

from runtime.prompting.clean import RULES, clean

ALL = [rule.name for rule in RULES]
PROSE = [name for name in ALL if name != "tags"]


@pytest.mark.parametrize(
    ("text", "expected", "rules"),
    [
        ('"a red fox"', "a red fox", ["quotes"]),
        ("\u201ca red fox\u201d", "a red fox", ["quotes"]),
        ('"a fox" and "a dog"', '"a fox" and "a dog"', []),
        ("Here is your prompt:\n\na red fox", "a red fox", ["preamble"]),
        ("Sure! Here's a detailed prompt for SDXL: a red fox", "a red fox", ["preamble"]),
        ("Certainly!\n\na red fox", "a red fox", ["preamble"]),
        ("**Prompt:** a red fox", "a red fox", ["label"]),
        ("Sure, here is the prompt:\n```text\na red fox\n```\nEnjoy!", "a red fox", ["fences"]),
        ("a **red** fox\n__sits__", "a red fox sits", ["markdown", "one_line"]),
        ("1. a red fox", "a red fox", ["numbering"]),
        ("Here we see a red fox in snow, 35mm: grainy", "Here we see a red fox in snow, 35mm: grainy", []),
        ("Great heron by a lake", "Great heron by a lake", []),
        ("a sign that says: STOP", "a sign that says: STOP", []),
        ("(red fox:1.2), snow__flake", "(red fox:1.2), snow__flake", []),
        ("", "", []),
    ],
)
def test_habits_of_models_are_taken_away_and_named(text, expected, rules):
    assert clean(text, PROSE) == (expected, rules)


def test_tags_become_one_line_without_doubles():
    assert clean("red fox, snow,\nRed Fox, snow, night.", ["tags"]) == ("red fox, snow, night", ["tags"])


def test_lines_of_several_prompts_stay_lines():
    assert clean("1. a fox\n2. a dog\n- a cat", ["numbering"]) == ("a fox\na dog\na cat", ["numbering"])


def test_only_the_rules_that_were_asked_for_apply():
    assert clean('Here is your prompt: "a fox"', ["quotes"]) == ('Here is your prompt: "a fox"', [])
    assert clean(" a fox ", []) == (" a fox ", [])


def test_an_unknown_rule_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no cleaning rule sparkle. Rules are: fences, preamble"):
        clean("x", ["sparkle"])
