import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.commands import doctor
from runtime.engines import ENGINES
from runtime.shell import for_shell

ROOT = Path(__file__).parents[3]
SECTIONS = [
    "pack", "python", "system", "packages", "torch", "devices", "driver", "nvcc", "flash_attn", "engines",
    "patches", "model_folders",
]  # fmt: skip


def run(*words, isolated=False):
    python = [sys.executable, *(["-S"] if isolated else [])]
    return subprocess.run(
        [*python, "-m", "runtime", "doctor", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def bare():
    """What a Python without any package says."""
    done = run("--json", isolated=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_any_package_every_section_is_there(bare):
    assert list(bare) == SECTIONS
    assert bare["torch"]["fault"] == "torch is not installed"
    assert bare["devices"][0]["device"] == "cpu"


def test_every_engine_says_whether_it_can_run_and_why_not(bare):
    reasons = {one["name"]: one["why_unavailable"] for one in bare["engines"]}

    assert list(reasons) == [row.name for row in ENGINES if row.name != "scripted"]
    assert reasons["transformers"] == "the package torch is not installed"


def test_the_lines_name_every_engine_and_a_remedy_for_those_that_cannot_run(bare):
    text = "\n".join(doctor._lines(bare))

    remedy = f"Try: {for_shell('pip install transformers')}"
    assert f"transformers  cannot run: the package torch is not installed. {remedy}" in text
    assert "scripted" not in text
    assert "exllamav2 is not installed" in text
    assert "flash-attn    cannot be used: not installed; install torch with CUDA first" in text


def test_a_device_that_torch_has_no_code_for_and_a_second_copy_are_told(bare):
    device = {
        "device": "cuda:0", "name": "Old Card", "capability": "6.1", "total_bytes": 8e9, "free_bytes": 7e9,
        "fault": "torch 2.13.0 has no code for capability 6.1: it has ['sm_75']",
    }  # fmt: skip
    pack = {**bare["pack"], "other_copies": ["/custom_nodes/resident-llm-main"]}

    text = "\n".join(doctor._lines({**bare, "devices": [device], "pack": pack}))

    assert "cuda:0  Old Card, capability 6.1, 7.0 GB of 8.0 GB free\n          torch 2.13.0 has no code" in text
    assert "A second copy is in /custom_nodes/resident-llm-main: remove one of them." in text


def test_claims_answers_one_id_with_the_truth_and_what_is_done_here():
    done = run("--claims", "s00-21")

    assert done.returncode == 0
    assert done.stdout.startswith("S00-21  not true: ExLlamaV2's attn.py must be patched")
    assert "no_sdpa" in done.stdout


def test_claims_can_be_searched_by_words_and_given_as_json():
    found = json.loads(run("--claims", "block_size flash-attn", "--json").stdout)

    assert [one["id"] for one in found] == ["S01-11"]


def test_a_search_that_finds_nothing_says_so():
    done = run("--claims", "zebra")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "No claim matches 'zebra'. Leave the words out to see all, or try one word.\n"
