"""The texts of all languages: the same keys everywhere, and a real translation behind each."""

from __future__ import annotations

import ast
import json
import re

import pytest

from tools.comfyui import ROOT
from tools.locales import FOLDER, keys

LANGUAGES = sorted(path.name for path in FOLDER.iterdir())
FILES = sorted(path.name for path in (FOLDER / "en").iterdir())
SAME = {"top_p", "top_k", "min_p", "LoRA", "Resident LLM"}


def read(language, file):
    return json.loads((FOLDER / language / file).read_text(encoding="utf-8"))


def texts(values):
    for value in values.values():
        if isinstance(value, dict):
            yield from texts(value)
        else:
            yield value


def test_both_languages_are_there_with_the_same_files():
    assert LANGUAGES == ["en", "zh"]
    assert sorted(path.name for path in (FOLDER / "zh").iterdir()) == FILES


@pytest.mark.parametrize("file", FILES)
def test_no_key_is_missing_or_orphaned(file):
    english, chinese = set(keys(read("en", file))), set(keys(read("zh", file)))

    assert chinese - english == set(), "orphaned"
    assert english - chinese == set(), "missing"


@pytest.mark.parametrize("file", FILES)
def test_every_chinese_text_is_chinese(file):
    found = [text for text in texts(read("zh", file)) if text not in SAME and not re.search(r"[\u4e00-\u9fff]", text)]

    assert found == []


def test_every_node_and_input_in_the_code_is_in_the_texts():
    """Read from the schemas without a server: ids of nodes, and of the inputs that are written out in them."""
    known = read("en", "nodeDefs.json")
    for file in sorted((ROOT / "nodes").glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            fields = {keyword.arg: keyword.value for keyword in call.keywords}
            if "node_id" not in fields or "inputs" not in fields:
                continue
            node_id = ast.literal_eval(fields["node_id"])
            names = [
                one.args[0]
                for one in ast.walk(fields["inputs"])
                if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "Input"
            ]
            inputs = {name.value for name in names if isinstance(name, ast.Constant)}
            there = set(known[node_id]["inputs"])
            is_all = all(isinstance(name, ast.Constant) for name in names)  # others are numbered in a loop
            assert there == inputs if is_all else there > inputs, node_id


def test_each_category_and_socket_type_of_the_code_has_a_text():
    main = read("en", "main.json")
    types = set(re.findall(r'io\.Custom\("(RESIDENT_\w+)"\)', (ROOT / "nodes" / "types.py").read_text()))

    assert set(main["dataTypes"]) == types
    assert f'CATEGORY = "{next(iter(main["nodeCategories"]))}"' in (ROOT / "nodes" / "schema.py").read_text()


def test_what_the_page_says_by_itself_is_the_english_text_and_what_it_is_told_is_the_servers():
    said = read("en", "main.json")["residentLlm"]
    page = (ROOT / "web" / "words.mjs").read_text(encoding="utf-8")
    residency = ast.parse((ROOT / "nodes" / "residency.py").read_text(encoding="utf-8"))
    (notices,) = [
        ast.literal_eval(one.value)
        for one in residency.body
        if isinstance(one, ast.Assign) and one.targets[0].id == "NOTICES"
    ]

    english = re.search(r"const ENGLISH = \{\n(.*?)\n\};", page, flags=re.DOTALL)[1]

    assert {"notices": notices, **dict(re.findall(r'(\w+): "([^"]*)"', english))} == said
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").glob("*.*js"))
    assert set(re.findall(r'\bsay\("(\w+)"', code)) <= set(said)


def test_a_translated_notice_has_the_same_values_in_it():
    english, chinese = (read(language, "main.json")["residentLlm"]["notices"] for language in LANGUAGES)

    for kind, text in english.items():
        assert sorted(re.findall(r"\{(\w+)\}", chinese[kind])) == sorted(re.findall(r"\{(\w+)\}", text)), kind


def test_the_page_has_no_setting_and_no_command_without_a_text():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "web").glob("*.*js"))

    assert not re.search(r"^\s*(settings|commands|menuCommands):", code, flags=re.MULTILINE)
