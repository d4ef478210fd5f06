import pytest

from runtime import Message, Prompt
from runtime.errors import ModelNotFound, TemplateFailed
from runtime.prompting.chat_template import ChatTemplate
from runtime.prompting.prompter import Prompter
from runtime.prompting.template_choice import built_in_names
from tests.runtime.prompting.kinds import CHATML, KINDS, sentencepiece, write_model

TURNS = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "  Hello, wörld!\n\n\u4f60\u597d \U0001f3a8"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": 'Say "x".'},
]
CONSTRUCTS = {
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "strftime_now": "{{ strftime_now('%d %b %Y') }}{{ messages[-1].content }}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=True) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{{ m['content'] | trim }}{% endfor %}",
    "macro": "{% macro say(m) -%}<|im_start|>{{ m.role | upper }}: {{ m.content }}{%- endmacro %}"
    "{% for m in messages %}\n    {{ say(m) }}\n{% endfor %}",
    "named tokens": "{{ bos_token }}{{ messages[1]['content'] }}{{ eos_token }}{{ pad_token or '' }}",
    "slices": "{% for m in messages[::-1] %}{{ m.content[1:] }}{{ m.content.split(' ')[0] }}{% endfor %}",
    "raise_exception": "{% if messages | length > 9 %}{{ raise_exception('too long') }}{% endif %}"
    "{{ messages[3].content }}",
    "white space": "{% for m in messages %}\n  {% if m.content %}\n    {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "nothing given": "{{ 'tools' if tools else 'none' }}{{ documents is none }}{{ messages[0].content }}",
    "options": "{{ custom if custom is defined else 'no' }}{{ messages[0].content }}",
}


def prompt_of(turns, **fields):
    return Prompt(messages=tuple(Message.of(turn["role"], turn["content"]) for turn in turns), **fields)


@pytest.fixture(scope="module")
def auto_tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer


@pytest.fixture(scope="module")
def both(model_folder, auto_tokenizer):
    """Our prompter and transformers' tokenizer of one model."""
    loaded = {}

    def get(kind):
        if kind not in loaded:
            folder = str(model_folder(kind))
            loaded[kind] = Prompter.load(folder), auto_tokenizer.from_pretrained(folder)
        return loaded[kind]

    return get


def theirs(tokenizer, turns, **options):
    return tuple(
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False, **options)
    )


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_those_of_transformers(kind, first, both):
    prompter, tokenizer = both(kind)

    encoded = prompter.encode(prompt_of(TURNS[first:]))

    assert encoded.token_ids == theirs(tokenizer, TURNS[first:])


@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
def test_each_construct_gives_the_ids_of_transformers(kind, name, both):
    prompter, tokenizer = both(kind)

    encoded = prompter.encode(prompt_of(TURNS, template=CONSTRUCTS[name], template_options=(("custom", "yes"),)))

    assert encoded.token_ids == theirs(tokenizer, TURNS, chat_template=CONSTRUCTS[name], custom="yes")


@pytest.mark.parametrize("thinking", ["auto", "on", "off"])
def test_thinking_is_the_templates_own_switch(thinking, both):
    prompter, tokenizer = both("qwen3")
    options = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}

    encoded = prompter.encode(prompt_of(TURNS, thinking=thinking))

    assert encoded.token_ids == theirs(tokenizer, TURNS, **options)
    assert encoded.text.endswith("<think>\n\n</think>\n\n") is (thinking == "off")
    assert encoded.reasoning.is_open is False


def test_a_template_that_looks_into_the_text_keeps_what_it_says(both):
    prompter, _ = both("qwen3")
    turns = [{"role": "user", "content": "<tool_response>x</tool_response>"}, *TURNS[2:]]

    encoded = prompter.encode(prompt_of(turns))

    assert "<|im_start|>user\n<tool_response>x</tool_response><|im_end|>" in encoded.text


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"chat_template": CHATML}},
        {"tokenizer_config": {"chat_template": [{"name": "default", "template": CHATML}]}},
        {"tokenizer_config": {"chat_template": [{"name": "only", "template": CHATML}]}},
        {"chat_template": {"chat_template": CHATML}},
        {"processor_config": {"chat_template": CHATML}},
    ],
)
def test_the_template_is_found_in_any_config(files, tmp_path):
    folder = write_model(tmp_path, sentencepiece(), **files)

    encoded = Prompter.load(str(folder)).encode(Prompt.of("Hello."))

    assert encoded.text == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"


def test_a_jinja_file_counts_more_than_the_config(tmp_path):
    folder = write_model(tmp_path, sentencepiece(), tokenizer_config={"chat_template": "config"})
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates/rag.jinja").write_text("rag {{ messages[0].content }}", encoding="utf-8")
    prompter = Prompter.load(str(folder))

    assert prompter.encode(Prompt.of("Hello.")).text.startswith("<|im_start|>user")
    assert prompter.encode(prompt_of(TURNS[1:2], template="rag")).text.startswith("rag ")


def test_a_changed_template_is_read_again(tmp_path):
    folder = write_model(tmp_path, sentencepiece())
    (folder / "chat_template.jinja").write_text("one {{ messages[0].content }}", encoding="utf-8")
    first = Prompter.load(str(folder)).encode(Prompt.of("x")).text

    (folder / "chat_template.jinja").write_text("another {{ messages[0].content }}", encoding="utf-8")

    assert (first, Prompter.load(str(folder)).encode(Prompt.of("x")).text) == ("one x", "another x")


@pytest.fixture
def bare(tmp_path):
    return Prompter.load(str(write_model(tmp_path, sentencepiece(), tokenizer_config={"eos_token": "</s>"})))


def test_a_model_without_a_template_lists_the_choices(bare):
    with pytest.raises(TemplateFailed, match=r"has no chat template. Set `template`.*alpaca, chatml, gemma.*Jinja"):
        bare.encode(Prompt.of("Hello."))


@pytest.mark.parametrize("name", built_in_names())
def test_each_built_in_rule_renders_a_conversation(name, bare):
    encoded = bare.encode(prompt_of(TURNS, template=name, fold_system=True))

    at = [encoded.text.index(turn["content"].strip()) for turn in TURNS]
    assert at == sorted(at)


def test_a_foreign_rule_says_which_tokens_the_model_does_not_know(bare):
    [note] = bare.encode(prompt_of(TURNS, template="llama-3")).notes

    assert note.startswith("The chat template writes <|start_header_id|>, <|end_header_id|>, <|eot_id|>, which")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "refuses these messages: Roles must alternate"),
        ("{{ messages[9].content }}", "refuses these messages: .*no element 9"),
        ("{{ messages[0].content + 1 }}", "refuses these messages: can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "not safe, so it was stopped: .*__class__"),
        ("{{ messages.append(1) }}", "not safe, so it was stopped: .*append"),
        ("{% for m in messages %}", "cannot be read: .*endfor.* \\(line 1\\)"),
        ("no-such-rule", "no chat template 'no-such-rule'.*chatml"),
    ],
)
def test_a_template_that_fails_says_why_in_its_own_words(template, words, bare):
    with pytest.raises(TemplateFailed, match=words):
        bare.encode(prompt_of(TURNS[1:], template=template))


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + CHATML


def test_a_refused_system_message_is_folded_only_if_asked_for(bare):
    with pytest.raises(TemplateFailed, match=r"No system role.*turn on fold_system"):
        bare.encode(prompt_of(TURNS, template=REFUSING))

    folded = bare.encode(prompt_of(TURNS, template=REFUSING, fold_system=True))

    assert folded.text.startswith("<|im_start|>user\nYou are terse.\n\n  Hello")
    assert folded.notes == ("The chat template takes no system message: its text begins the first user message.",)


def test_a_system_message_that_the_template_drops_is_noted(bare):
    silent = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"

    [note] = bare.encode(prompt_of(TURNS, template=silent)).notes

    assert note.startswith("The chat template leaves the system message out.")


def test_unknown_role_and_empty_prompt_are_told_before_any_template():
    with pytest.raises(ValueError, match="role 'tool'; roles are system, user, assistant"):
        Message.of("tool", "x")
    with pytest.raises(ValueError, match="holds no user text"):
        Prompt.of("  ")
    with pytest.raises(ValueError, match="The prompt is empty"):
        Prompt(messages=())


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ModelNotFound, match="no model at /nowhere"):
        Prompter.load("/nowhere")


def test_a_template_cannot_run_on_and_on():
    with pytest.raises(TemplateFailed, match="Range too big"):
        ChatTemplate("{% for i in range(10**9) %}x{% endfor %}", {}).render([("user", "x")], {})


def test_a_template_whose_constants_fail_says_so():
    with pytest.raises(TemplateFailed, match=r"^The chat template cannot be read: .*Correct it"):
        ChatTemplate("{{ " + "9" * 5000 + " }}", {})
