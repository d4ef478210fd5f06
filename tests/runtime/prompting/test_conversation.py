import pytest

from runtime import Message, ModelSpec, Prompt
from runtime.prompting import presets
from runtime.prompting.conversation import compose, continued, preview, template_choices, template_of
from runtime.prompting.prompter import Prompter


def roles(prompt):
    return [(message.role, message.text) for message in prompt.messages]


def test_turns_are_chained_by_values_alone():
    first = compose(system="Be brief.", user="One?", answer_prefix="It is ")
    second = compose(system="", user="Two?", history=continued(first, "1."))
    third = compose(system="Be long.", user="Three?", history=continued(second, "2."))

    assert roles(third) == [
        ("system", "Be long."),
        ("user", "One?"),
        ("assistant", "It is 1."),
        ("user", "Two?"),
        ("assistant", "2."),
        ("user", "Three?"),
    ]
    assert roles(second)[0] == ("system", "Be brief.")
    assert roles(first) == [("system", "Be brief."), ("user", "One?")]


def test_a_history_without_its_answer_is_refused():
    with pytest.raises(ValueError, match="history is wired, but history_answer is empty"):
        continued(Prompt.of("x"), " ")


def test_a_preset_brings_its_system_text_its_pattern_and_its_cleaning():
    preset = presets.Preset(id="p", title="", about="", system="Do it.", user="Idea: {text}", clean=("quotes",))

    prompt = compose(system="In German.", user="a {text} fox", preset=preset)

    assert roles(prompt) == [("system", "Do it.\n\nIn German."), ("user", "Idea: a {text} fox")]
    assert prompt.clean == ("quotes",)
    assert compose(system="", user="x", preset=preset, cleaning="off").clean == ()
    assert "fences" in compose(system="", user="x", cleaning="text").clean


def test_tags_come_in_pairs():
    assert compose(system="", user="x", thinking_tags="<a>\n</a>").thinking_tags == ("<a>", "</a>")
    with pytest.raises(ValueError, match="thinking_tags holds 1 tags"):
        compose(system="", user="x", thinking_tags="<a>")


def test_a_template_is_the_models_own_a_rule_or_a_file_of_the_users(tmp_path):
    (tmp_path / "terse.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")

    assert template_choices([tmp_path]) == [
        "auto", "alpaca", "chatml", "gemma", "llama-3", "mistral", "plain", "my/terse",
    ]  # fmt: skip
    assert template_of("auto", [tmp_path]) is None
    assert template_of("chatml", [tmp_path]) == "chatml"
    assert template_of("my/terse", [tmp_path]) == "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="no chat template 'my/gone'"):
        template_of("my/gone", [tmp_path])


def test_a_preview_needs_the_models_own_tokenizer(model_folder):
    folder = str(model_folder("sentencepiece"))
    prompt = Prompt(messages=(Message.of("user", "Hi <s>."),))

    assert preview(ModelSpec(model=folder), prompt) == Prompter.load(folder).encode(prompt)
    assert preview(ModelSpec(model="served-model"), prompt) is None


def test_an_unknown_way_to_clean_is_told():
    with pytest.raises(ValueError, match=r"^clean is 'spotless'; it is one of preset, off, text"):
        compose(system="", user="x", cleaning="spotless")


@pytest.mark.parametrize("spoil", [lambda file: file.symlink_to("gone"), lambda file: file.write_bytes(b"\xff")])
def test_a_template_that_cannot_be_read_is_told(spoil, tmp_path):
    spoil(tmp_path / "broken.jinja")

    with pytest.raises(ValueError, match=r"^The chat template my/broken cannot be read: "):
        template_of("my/broken", [tmp_path])
