import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from runtime import commands
from tests.imports import ROOT

TWINS = [("README.md", "README.zh-CN.md"), ("docs/troubleshooting.md", "docs/troubleshooting.zh-CN.md")]
DOCUMENTS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *(name for pair in TWINS for name in pair)]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()]
COMMANDS = [line for line in SHELL if line.startswith("python -m runtime")]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_to_a_file_leads_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)

    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_make_target_that_is_named_exists(name):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = re.findall(
        r"make\s([a-z-]+)`|^make ([a-z-]+)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE
    )

    assert {first or second for first, second in named} - set(targets) == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_that_is_named_exists(name):
    named = set(re.findall(r"python -m runtime (\w+)", (ROOT / name).read_text(encoding="utf-8")))

    assert named - set(commands.names()) == set()
    assert name != "README.md" or {"doctor", "inspect", "generate", "download"} <= named


@pytest.mark.parametrize(("english", "chinese"), TWINS)
def test_both_languages_have_the_same_shape(english, chinese):
    def shape(name):
        """Heading levels, fenced blocks, table rows and commands, in order."""
        text = (ROOT / name).read_text(encoding="utf-8")
        blocks = re.findall(r"```\w*\n.*?```", text, flags=re.DOTALL)
        bare = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
        marks = re.findall(r"^(#+) |^(\|)|^(<!-- \w+:\w+ -->)|^(- )", bare, flags=re.MULTILINE)
        return ["".join(one) for one in marks], blocks, re.findall(r"`(python -m runtime [^`]+)`", bare)

    marks, blocks, named = shape(english)
    twin_marks, twin_blocks, twin_named = shape(chinese)

    assert twin_marks == marks
    assert twin_blocks == blocks
    assert sorted(twin_named) == sorted(named)


def test_every_place_in_the_tree_of_the_architecture_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    folder, places = "", []
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith("  "):
            name = folder + name
        elif name.endswith("/"):
            folder = name
        places.append(name)

    assert len(places) > 25
    assert [place for place in places if not (ROOT / place).exists()] == []


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme_runs(line, model_path, tmp_path):
    pytest.importorskip("transformers")
    short = re.sub(r"--max-tokens \d+", "--max-tokens 8", line)
    words = [str(model_path) if word == "MODEL" else word for word in shlex.split(short)[1:]]

    env = {**os.environ, "RESIDENT_LLM_PROFILES": str(tmp_path / "profiles.json")}

    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "--json" in words:
        assert json.loads(done.stdout)["report"]["finish"]["reason"] in ("stop", "length")
