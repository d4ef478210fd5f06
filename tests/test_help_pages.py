"""The help pages of the nodes, in both languages, against the nodes' own definitions."""

import ast
import re

import pytest

from tests.imports import ROOT
from tools.docs import NODES, registered

PAGES = ROOT / "web" / "docs"
PARTS = {
    "en": ("# ", "## Inputs", "## Example", "## Common errors"),
    "zh": ("# ", "## \u8f93\u5165", "## \u793a\u4f8b", "## \u5e38\u89c1\u9519\u8bef"),
}


def inputs_by_node():
    """node id -> names of its inputs, read from the schemas without ComfyUI."""
    found = {}
    for file in sorted(NODES.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in registered():
                calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
                [node_id] = [k.value.value for one in calls for k in one.keywords if k.arg == "node_id"]
                names = [
                    one.args[0].value
                    for one in calls
                    if isinstance(one.func, ast.Attribute)
                    and one.func.attr == "Input"
                    and one.args
                    and isinstance(one.args[0], ast.Constant)
                ]
                found[node_id] = names
    return found


INPUTS = inputs_by_node()
PAGE_OF = {"en": lambda node: PAGES / f"{node}.md", "zh": lambda node: PAGES / node / "zh.md"}


def test_every_registered_node_is_found_with_its_inputs():
    assert len(INPUTS) == len(registered()) >= 10
    assert INPUTS["ResidentConnectServer"] == ["profile", "model", "other_model", "when_idle"]


@pytest.mark.parametrize("language", PARTS)
@pytest.mark.parametrize("node", INPUTS)
def test_every_node_has_a_page_that_names_all_its_inputs(node, language):
    text = PAGE_OF[language](node).read_text(encoding="utf-8")

    assert [name for name in INPUTS[node] if f"**{name}**" not in text] == []
    assert [part for part in PARTS[language] if not re.search(f"^{part}", text, flags=re.MULTILINE)] == []


def test_both_languages_have_the_same_inputs_and_as_many_rows():
    def shape(node, language):
        text = PAGE_OF[language](node).read_text(encoding="utf-8")
        return re.findall(r"^- \*\*(.+?)\*\*", text, flags=re.MULTILINE), text.count("\n| ")

    differing = []
    for node in INPUTS:
        (english, num_english), (chinese, num_chinese) = shape(node, "en"), shape(node, "zh")
        if (sorted(english), num_english) != (sorted(chinese), num_chinese):
            differing.append(node)

    assert differing == []
