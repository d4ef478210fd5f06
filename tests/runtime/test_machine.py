import doctest
import os
import stat
import sys

import pytest

from runtime import machine


def tool(folder, name, output):
    """An executable that prints `output`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_probe_gives_what_its_process_printed():
    assert machine.probe("print('noise'); print('{\"a\": 1}')").facts == {"a": 1}


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import os; os.kill(os.getpid(), 11)", "the process ended with code -11"),
    ],
)
def test_a_probe_that_breaks_is_only_a_sentence(code, fault):
    assert machine.probe(code).fault == fault


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(machine, "PROBE_S", 0.2)

    assert machine.probe("import time; time.sleep(60)").fault == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ("8.9", ["sm_80", "sm_86", "sm_90"], True),
        ("8.6", ["sm_89"], False),
        ("7.5", ["sm_80", "sm_90"], False),
        ("12.0", ["sm_90", "compute_90"], True),
        ("9.0", ["sm_90a"], True),
        ("9.0", [], False),
    ],
)
def test_machine_code_runs_on_later_minors_and_intermediate_code_on_all_later(capability, archs, runs):
    assert machine.runs_on(capability, archs) is runs


def test_the_driver_is_read_from_nvidia_smi(tmp_path, monkeypatch):
    tool(tmp_path, "nvidia-smi", "| NVIDIA-SMI 580.65  Driver Version: 580.65.06  CUDA Version: 13.0 |")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert machine.driver() == {"version": "580.65.06", "max_cuda": "13.0", "fault": None}


def test_a_driver_that_does_not_answer_is_told_in_its_own_words(tmp_path, monkeypatch):
    tool(tmp_path, "nvidia-smi", "NVIDIA-SMI has failed because it could not talk to the driver.")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert machine.driver()["fault"] == "NVIDIA-SMI has failed because it could not talk to the driver."


@pytest.mark.parametrize(("torch_cuda", "fits"), [("13.0", True), ("12.8", False), (None, True)])
def test_an_nvcc_of_another_major_version_than_torch_is_told(tmp_path, monkeypatch, torch_cuda, fits):
    (tmp_path / "bin").mkdir()
    tool(tmp_path / "bin", "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))

    found = machine.nvcc(torch_cuda)

    assert found["version"] == "13.0"
    assert (found["fault"] is None) is fits


def test_the_facts_are_gathered_without_torch_in_this_process():
    code = (
        "import json, sys; from runtime import machine; facts = machine.look(); "
        "print(json.dumps({'loaded': [m for m in ('torch', 'transformers') if m in sys.modules], "
        "'version': facts['torch']['version']}))"
    )

    found = machine.probe(code, python=sys.executable)

    assert found.facts["loaded"] == []


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(machine).failed == 0


@pytest.mark.gpu
def test_on_a_gpu_its_card_driver_and_memory_are_told():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    facts = machine.look()

    cards = [one for one in facts["devices"] if one["device"] != "cpu"]
    assert [one["name"] for one in cards] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert all(0 < one["free_bytes"] <= one["total_bytes"] and one["fault"] is None for one in cards)
    assert facts["torch"]["cuda"] == torch.version.cuda
    assert facts["driver"]["fault"] is None and facts["driver"]["max_cuda"]
    flash = facts["flash_attn"]
    assert flash["works"] is (flash["fault"] is None)
    assert flash["works"] is False or flash["max_error"] < machine.FLASH_TOLERANCE
