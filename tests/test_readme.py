import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from runtime import commands
from tests.imports import ROOT

DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()]
COMMANDS = [line for line in SHELL if line.startswith("python -m runtime")]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_to_a_file_leads_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)

    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_make_target_that_is_named_exists(name):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = re.findall(
        r"make\s([a-z-]+)`|^make ([a-z-]+)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE
    )

    assert {first or second for first, second in named} - set(targets) == set()


def test_every_command_that_is_named_exists():
    named = set(re.findall(r"python -m runtime (\w+)", README))

    assert named - set(commands.names()) == set()
    assert {"doctor", "inspect", "generate"} <= named


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
