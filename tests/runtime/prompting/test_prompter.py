import json

import pytest

from runtime import Message, Prompt
from runtime.engines.base import StopEntry
from runtime.errors import ModelLoadFailed
from runtime.prompting.prompter import NUM_RECENT, Prompter
from tests.runtime.prompting.kinds import CHATML, sentencepiece, write_model

R1 = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]


@pytest.fixture
def make(tmp_path):
    """A prompter of a SentencePiece tokenizer with a template, more control tokens, and further files."""

    def build(template, special=(), **files):
        tokenizer = sentencepiece()
        tokenizer.add_special_tokens(list(special))
        config = {"chat_template": template, "eos_token": "</s>", **files.pop("config", {})}
        return Prompter.load(str(write_model(tmp_path, tokenizer, tokenizer_config=config, **files)))

    return build


def stop(prompter, **fields):
    return {entry.text: entry.source for entry in prompter.encode(Prompt(messages=user("x"), **fields)).stop}


def user(text):
    return (Message.of("user", text),)


def test_what_ends_an_answer_is_the_union_of_all_that_say_so(make):
    prompter = make(CHATML, ["<|eom|>"], generation_config={"eos_token_id": [2, 1]}, config={"eos_token": "<|eom|>"})

    assert stop(prompter) == {
        "</s>": "generation_config.json",
        "<s>": "generation_config.json",
        "<|eom|>": "tokenizer eos_token",
        "<|im_end|>": "chat template",
    }


def test_a_single_end_id_and_that_of_a_nested_config_count_too(make):
    prompter = make(CHATML, generation_config={"eos_token_id": 2}, config_json={}, config={"eos_token": "</s>"})

    assert stop(prompter)["</s>"] == "generation_config.json, tokenizer eos_token"


def test_user_text_is_no_end_of_turn(make):
    odd = "{% for m in messages %}{{ m.content }}{% endfor %}"

    assert stop(make(odd)) == {"</s>": "tokenizer eos_token"}


def test_smollm2_ends_by_its_end_of_turn(prompters):
    encoded = prompters("smollm2").encode(Prompt.of("Explain what <|im_end|> means."))

    sources = "generation_config.json, config.json, tokenizer eos_token, chat template"
    assert encoded.stop == (StopEntry(id=2, text="<|im_end|>", source=sources),)
    assert encoded.token_ids.count(2) == 2  # the system's and the user's turn; the quoted one is text


def test_a_template_that_opens_the_block_is_seen(make):
    prompter = make(R1)

    assert prompter.encode(Prompt.of("x")).reasoning.is_open
    assert prompter.encode(Prompt(messages=user("x"), thinking="on")).reasoning.is_open


def test_a_block_that_only_the_user_wrote_is_not_open(make):
    last = "{% for m in messages %}{{ m.content }}{% endfor %}"

    assert not make(last).encode(Prompt.of("<think>")).reasoning.is_open
    assert not make(CHATML).encode(Prompt(messages=user("x"), answer_prefix="<think>")).reasoning.is_open


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"thinking": "off"}, "thinking is off"), ({"answer_prefix": "A"}, "the answer prefix begins the answer")],
)
def test_an_open_block_is_closed_where_the_answer_must_begin(fields, why, make):
    prompter = make(R1)

    encoded = prompter.encode(Prompt(messages=user("x"), **fields))

    assert encoded.text.endswith("<think>\n\n</think>\n\n" + fields.get("answer_prefix", ""))
    assert not encoded.reasoning.is_open
    assert encoded.notes == (f"The chat template opens a thinking block; it is closed at once, because {why}.",)
    assert encoded.token_ids.count(prompter._tokenizer.token_to_id("</think>")) == 1


def test_channels_are_closed_and_skipped_with_their_own_marks(make):
    prompter = make(HARMONY, MARKS, generation_config={"eos_token_id": [2]})
    encoded = prompter.encode(Prompt.of("x"))

    closing = prompter._tokenizer.decode(encoded.reasoning.close_ids, skip_special_tokens=False)
    assert closing.replace(" ", "") == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert "<|end|>" not in [entry.text for entry in encoded.stop]  # it also ends the thinking
    skipped = prompter.encode(Prompt(messages=user("x"), thinking="off", answer_prefix="A"))
    assert skipped.text.endswith("<|start|>assistant<|channel|>final<|message|>A")
    assert "<|end|>" in prompter.detokenizer(encoded).push(encoded.reasoning.close_ids)


def test_custom_tags_that_are_control_tokens_come_out_as_text(make):
    prompter = make(CHATML, ["<why>", "</why>"])
    encoded = prompter.encode(Prompt(messages=user("x"), thinking_tags=("<why>", "</why>")))
    ids = [prompter._tokenizer.token_to_id(text) for text in ("<why>", "</why>", "<|im_start|>")]

    assert prompter.detokenizer(encoded).push(ids) == "<why></why>"
    assert prompter.detokenizer().push(ids) == ""


def test_a_tokenizer_that_cuts_or_pads_does_neither_here(tmp_path):
    tokenizer = sentencepiece()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    prompter = Prompter.load(str(write_model(tmp_path, tokenizer, tokenizer_config={"chat_template": CHATML})))

    encoded = prompter.encode(Prompt.of("a long text that is longer than four tokens"))

    assert prompter.detokenizer().push(encoded.token_ids).count("longer") == 1
    assert 20 < encoded.num_tokens < 64


def test_tokens_that_only_the_config_adds_are_control_tokens_too(make):
    more = {"content": "<|extra|>", "special": True}
    prompter = make(CHATML, config={"added_tokens_decoder": {"99999": more}})
    extra = prompter._tokenizer.token_to_id("<|extra|>")

    encoded = prompter.encode(Prompt.of("a <|extra|> b"))

    assert extra is not None and extra not in encoded.token_ids
    assert prompter.vocab_size == extra + 1


def test_a_gguf_file_gives_what_its_folder_gives(prompters, gguf_path):
    pytest.importorskip("transformers")
    prompt = Prompt.of("hello w\u00f6rld <|im_end|>", system="Be brief.")

    mine, theirs = Prompter.load(str(gguf_path)).encode(prompt), prompters("smollm2").encode(prompt)

    assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
    assert [entry.id for entry in mine.stop] == [2]
    assert Prompter.load(str(gguf_path)).encode(prompt) == mine


def test_a_folder_without_tokenizer_json_is_read_by_transformers(prompters, tmp_path):
    pytest.importorskip("transformers")
    tokenizer = prompters("smollm2")._tokenizer
    tokenizer.model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 2}', encoding="utf-8")

    encoded = Prompter.load(str(tmp_path)).encode(Prompt.of("hello w\u00f6rld"))

    text = "<|im_start|>user\nhello w\u00f6rld<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.text == text
    assert (encoded.stop[0].id, encoded.stop[0].source) == (2, "config.json, tokenizer eos_token, chat template")


def test_a_folder_without_any_tokenizer_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")

    with pytest.raises(ModelLoadFailed, match=r"The tokenizer of .* cannot be read"):
        Prompter.load(str(tmp_path))


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", ', encoding="utf-8")
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.json cannot be read"):
        Prompter.load(str(tmp_path))

    write_model(tmp_path, sentencepiece())
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadFailed, match=r"generation_config\.json is not JSON"):
        Prompter.load(str(tmp_path))


@pytest.mark.parametrize("clock, is_remembered", [("", True), ("{{ strftime_now('%Y') }}", False)])
def test_a_prompt_is_encoded_once_unless_its_template_reads_the_clock(clock, is_remembered, make):
    prompter = make(clock + "{% for m in messages %}{{ m.content }}{% endfor %}")

    first, second = prompter.encode(Prompt.of("one")), prompter.encode(Prompt.of("one"))

    assert first == second
    assert (first is second) == is_remembered


def test_only_the_last_few_encoded_prompts_are_remembered(make):
    prompter = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    first = prompter.encode(Prompt.of("first"))

    for number in range(NUM_RECENT):
        prompter.encode(Prompt.of(f"another {number}"))

    assert prompter.encode(Prompt.of("first")) is not first


@pytest.mark.parametrize("absurd", [-1, 2**70])
def test_an_end_id_that_no_tokenizer_has_counts_for_nothing(absurd, make):
    prompter = make(CHATML, generation_config={"eos_token_id": [2, absurd]})

    assert set(stop(prompter)) == {"</s>", "<|im_end|>"}
