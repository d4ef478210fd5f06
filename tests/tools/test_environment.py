"""What set-up says on a machine that lacks something."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tools import environment
from tools.fault import Fault, told


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that runs this interpreter, so that its pip is real."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path / "venv"


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_out_of_range_is_refused_with_its_number_and_a_remedy(version: tuple[int, int]):
    with pytest.raises(Fault, match=rf"This is Python 3\.{version[1]}; .* 3\.11 to 3\.13\. Name another one: make run"):
        environment.check_python(version)


def test_a_full_disk_is_told_with_what_there_is_and_what_is_needed(tmp_path: Path):
    free = shutil.disk_usage(tmp_path).free

    with pytest.raises(Fault, match=r"has [\d.]+ GB free, and set-up needs [\d.]+ GB\. Free some space"):
        environment.check_disk(tmp_path, free * 2)


def test_what_pip_cannot_install_is_told_with_its_own_reason_and_leaves_no_stamp(
    venv: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    requirements = venv.parent / "requirements.txt"
    requirements.write_text("a-package-that-is-nowhere==1.0\n")

    with pytest.raises(
        Fault, match=r"No matching distribution found for a-package-that-is-nowhere==1\.0\. Check .* run make"
    ):
        environment.install(venv, requirements)

    assert not list(venv.glob(".installed-*"))


def test_a_list_is_installed_once_and_again_only_when_it_changes(venv: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "pip", lambda python, *arguments, log: calls.append(arguments))
    monkeypatch.setattr(environment, "check_disk", lambda *_: None)
    requirements = venv.parent / "requirements.txt"
    requirements.write_text("one==1\n")

    did = [environment.install(venv, requirements), environment.install(venv, requirements)]
    requirements.write_text("one==2\n")
    did.append(environment.install(venv, requirements))

    assert did == [True, False, True]
    assert calls == [("install", "--no-deps", "-r", str(requirements))] * 2


def test_torch_is_asked_for_once_more_so_that_a_cuda_build_gets_its_libraries(
    venv: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "pip", lambda python, *arguments, log: calls.append(arguments))
    monkeypatch.setattr(environment, "check_disk", lambda *_: None)
    requirements = venv.parent / "requirements.txt"
    requirements.write_text("one==1\ntorch==2.0\ntorchsde==1\n")

    environment.install(venv, requirements)

    assert calls[1:] == [("install", "torch==2.0")]


@pytest.mark.parametrize(("build", "needs_more"), [("2.0+cpu", False), ("2.0", True)])
def test_only_a_cuda_build_of_torch_needs_more_disk(
    build: str, needs_more: bool, venv: Path, monkeypatch: pytest.MonkeyPatch
):
    needs: list[tuple[int, ...]] = []
    monkeypatch.setattr(environment, "pip", lambda python, *arguments, log: None)
    monkeypatch.setattr(environment, "check_disk", lambda folder, *needed: needs.append(needed))
    (venv / "lib/python3.11/site-packages" / f"torch-{build}.dist-info").mkdir(parents=True)
    requirements = venv.parent / "requirements.txt"
    requirements.write_text("torch==2.0\n")

    environment.install(venv, requirements)

    assert needs == [(), (environment.CUDA_BYTES,)][: 1 + needs_more]


def test_an_environment_that_cannot_be_made_is_told_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho 'ensurepip is not available' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))

    with pytest.raises(Fault, match=r"could not make .*: ensurepip is not available\. .* apt-get install python3-venv"):
        environment.make_venv(tmp_path / "venv")


def test_a_fault_ends_a_tool_with_its_sentence_and_exit_code_1(capsys: pytest.CaptureFixture[str]):
    def main() -> int:
        raise Fault("The disk is full. Free some space.")

    assert told(main) == 1
    assert capsys.readouterr().err == "The disk is full. Free some space.\n"


def test_the_pinned_lists_name_each_package_once_with_one_version():
    for kinds in (("run", "test"), ("compat",)):
        lines = [
            line
            for kind in kinds
            for line in (environment.ROOT / "tools" / environment.LISTS[kind]).read_text().splitlines()
            if line and not line.startswith("#")
        ]

        names = [line.partition("==")[0].lower().replace("_", "-") for line in lines]

        assert all(line.partition(";")[0].count("==") == 1 for line in lines)
        assert len(names) == len(set(names))
