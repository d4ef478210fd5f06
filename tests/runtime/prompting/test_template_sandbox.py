"""Templates of strangers that would fill all memory, or run on and on; and honest ones that need much."""

import pytest

from runtime.errors import TemplateFailed
from runtime.prompting.chat_template import ChatTemplate
from tests.runtime.prompting.kinds import CHATML

NUMBER = 10**9
DOUBLING = "{{% set ns = namespace(s='x', t='') %}}{{% for i in range(99) %}}{}{{% endfor %}}{{{{ ns.s | length }}}}"
HOSTILE = {
    "text times": f"{{{{ 'x' * {NUMBER} }}}}",
    "times text": f"{{{{ {NUMBER} * 'x' }}}}",
    "list times": f"{{{{ ([0] * {NUMBER}) | length }}}}",
    "power": "{{ (7 ** (7 ** 9)) > 1 }}",
    "power of a power": "{% set ns = namespace(n=7) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "plus": DOUBLING.format("{% set ns.s = ns.s + ns.s %}"),
    "tilde": DOUBLING.format("{% set ns.s = ns.s ~ ns.s %}"),
    "set block": DOUBLING.format("{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}"),
    "macro": DOUBLING.format("{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns.s = m(ns.s) %}"),
    "percent doubles": DOUBLING.format("{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "format doubles": DOUBLING.format("{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    "format filter doubles": DOUBLING.format("{% set ns.s = '%s%s' | format(ns.s, ns.s) %}"),
    "join doubles": DOUBLING.format("{% set ns.s = ''.join([ns.s, ns.s]) %}"),
    "join filter doubles": DOUBLING.format("{% set ns.s = [ns.s, ns.s] | join %}"),
    "slices that are kept": "{% set ns = namespace(l=[]) %}{% set s = 'x' * 999999 %}{% for i in range(99999) %}"
    "{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "center filter": f"{{{{ 'x' | center({NUMBER}) }}}}",
    "indent filter": f"{{{{ 'x' | indent({NUMBER}, true) }}}}",
    "indent by text": "{{ ('\\n' * 99999) | indent('x' * 99999) }}",
    "format filter": f"{{{{ '%{NUMBER}d' | format(5) }}}}",
    "percent": f"{{{{ '%{NUMBER}d' % 5 }}}}",
    "percent precision": f"{{{{ '%.{NUMBER}f' % 5.0 }}}}",
    "percent star": f"{{{{ '%*d' % ({NUMBER}, 5) }}}}",
    "format": f"{{{{ '{{:{NUMBER}}}'.format(5) }}}}",
    "format nested": f"{{{{ '{{:{{}}}}'.format(5, {NUMBER}) }}}}",
    "format map": f"{{{{ '{{a:{NUMBER}}}'.format_map({{'a': 5}}) }}}}",
    "center": f"{{{{ 'x'.center({NUMBER}) }}}}",
    "ljust": f"{{{{ 'x'.ljust({NUMBER}) }}}}",
    "rjust": f"{{{{ 'x'.rjust({NUMBER}) }}}}",
    "zfill": f"{{{{ 'x'.zfill({NUMBER}) }}}}",
    "expandtabs": f"{{{{ '\\t'.expandtabs(tabsize={NUMBER}) }}}}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "join filter": "{{ (['b' * 99999] * 99999) | join }}",
    "join of a generator": "{{ (['b' * 99999] * 99999) | map('trim') | join }}",
    "batch": f"{{{{ [1] | batch({NUMBER}, 0) | list }}}}",
    "slice": f"{{{{ [1] | slice({NUMBER}) | list }}}}",
    "round": f"{{{{ 1.5 | round({NUMBER}, 'ceil') }}}}",
    "map": f"{{{{ ['x'] | map('center', {NUMBER}) | list }}}}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that select nothing": "{% for a in range(99999) %}"
    "{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops over a list": "{% set l = range(99999) | list %}"
    "{% for a in l %}{% for b in l if false %}{% endfor %}{% endfor %}",
    "loops over a filter": "{% set l = range(99999) | list %}"
    "{% for a in l %}{% for b in l | select %}{% endfor %}{% endfor %}",
    "text in loops": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "lists in lists": DOUBLING.format("{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s }}",
    "lists in lists as JSON": DOUBLING.format("{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s | tojson }}",
    "lists in lists as text": DOUBLING.format("{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s | string | length }}",
    "lists in lists by percent": DOUBLING.format("{% set ns.s = [ns.s, ns.s] %}") + "{{ '%r' % [ns.s] }}",
    "lists in lists by format": DOUBLING.format("{% set ns.s = [ns.s, ns.s] %}") + "{{ '{!r}'.format(ns.s) }}",
}
LEFT_OUT = {
    "bytes of a number": f"{{{{ (5).to_bytes({NUMBER}, 'big') }}}}",
    "bytes of a text": "{{ 'x'.encode() }}",
    "translate": "{{ 'x'.translate({120: 'y' * 999999}) }}",
    "lipsum": f"{{{{ lipsum({NUMBER}) }}}}",
    "urlize": "{{ 'http://x' | urlize }}",
    "wide JSON": f"{{{{ messages | tojson(indent={NUMBER}) }}}}",
    "JSON between much": "{{ messages | tojson(separators=('x' * 999999, ':')) }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_fill_the_memory_or_run_on_is_stopped(name):
    template = ChatTemplate(HOSTILE[name], {}, "The model's own chat template")

    with pytest.raises(TemplateFailed) as caught:
        template.render([("user", "x")], {})

    assert str(caught.value).startswith(
        "The model's own chat template was stopped: it makes more text, or does more, than 1 messages with "
    )
    assert "Choose another one: one of the built-in rules" in str(caught.value)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_no_chat_template_needs_and_could_do_harm_is_left_out(name):
    with pytest.raises(TemplateFailed, match="The chat template"):
        ChatTemplate(LEFT_OUT[name], {}).render([("user", "x")], {})


HONEST = {
    "plus": ("{{ 'a' + 'b' * 3 ~ 1 ~ [2] }}{{ 7 * 6 }}{{ 2 ** 10 }}{{ [1] + [2] }}", "abbb1[2]421024[1, 2]"),
    "format": (
        "{{ '{:>5}|{}'.format('x', 2) }}{{ '%05d|%s' % (42, 'y') }}{{ '%3d' | format(7) }}",
        "    x|200042|y  7",
    ),
    "format map": ("{{ '{a}'.format_map({'a': 1}) }}", "1"),
    "methods": (
        "{{ ' x '.strip() }}{{ 'a,b'.split(',') }}{{ '-'.join(['a', 'b']) }}{{ 'x'.center(3) }}",
        "x['a', 'b']a-b x ",
    ),
    "slices": ("{{ 'abcdef'[1:3] }}{{ [1, 2, 3][::-1] }}{{ messages[-1:][0].content }}", "bc[3, 2, 1]hello"),
    "filters": (
        "{{ 'a\\nb' | indent(2) }}{{ 'aba' | replace('a', 'c') }}{{ [1, 2] | join('+') }}{{ 1.26 | round(1) }}",
        "a\n  bcbc1+21.3",
    ),
    "lists": (
        "{{ messages | map(attribute='role') | join }}{{ [3, 1] | sort }}{{ [1, 2] | sum }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [1, 2, 3] | batch(2) | list }}",
        "user[1, 3]31[[1, 2], [3]]",
    ),
    "loops": (
        "{% for a in [1, 2] %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in messages if x.role == 'none' %}"
        "{% else %}none{% endfor %}{% for x in [1, 2] | select('odd') %}{{ loop.length }}{% endfor %}",
        "12False22Truea1none1",
    ),
    "nothing": ("{{ missing }}{{ none }}{{ missing | default('d') }}{% for x in missing %}{% endfor %}", "Noned"),
    "blocks": (
        "{% set a %}x{{ 1 }}{% endset %}{{ a }}{% filter upper %}y{% endfilter %}"
        "{% macro m() %}z{% endmacro %}{{ m() }}",
        "x1Yz",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_templates_do_comes_out_as_in_jinja(name):
    source, expected = HONEST[name]

    assert ChatTemplate(source, {}).render([("user", "hello")], {}) == expected


def test_a_conversation_of_a_million_tokens_is_no_reason_to_stop():
    turns = [("user", "word " * 400), ("assistant", "answer " * 300)] * 1000

    assert len(ChatTemplate(CHATML, {}).render(turns, {})) > 4_000_000


def test_a_template_that_builds_its_text_bit_by_bit_and_looks_at_all_messages_each_time_is_no_reason_to_stop():
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content + '\\n' %}"
        "{% for other in messages %}{% if other == m %}{% set last = loop.last %}{% endif %}{% endfor %}{% endfor %}"
        "{{ ns.t }}"
    )

    assert len(ChatTemplate(source, {}).render([("user", "a few words of text")] * 200, {})) == 4000


def test_what_one_prompt_used_up_is_there_again_for_the_next():
    template = ChatTemplate("{{ 'x' * (1000000 if messages[0].content == 'much' else 1) }}", {})

    assert [len(template.render([("user", "much")], {})) for _ in range(3)] == [1_000_000] * 3
    assert template.render([("user", "little")], {}) == "x"
