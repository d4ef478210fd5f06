import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import shell

PACK = Path(__file__).parents[2]


def test_a_command_of_the_documents_runs_in_any_folder_as_it_is_pasted(tmp_path):
    line = shell.for_shell("python -m runtime profiles", "list")

    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "local-vllm" in done.stdout


def test_packages_are_installed_for_the_python_that_runs():
    assert shlex.split(shell.for_shell("pip install", "a>=1")) == [sys.executable, "-m", "pip", "install", "a>=1"]


def test_what_is_not_ours_cannot_become_a_command_of_its_own():
    words = shlex.split(shell.for_shell("python -m runtime download", "a/b; rm -rf /"))

    assert words[2:] == ["download", "a/b; rm -rf /"]


@pytest.mark.parametrize(
    ("python", "line"),
    [
        (r"C:\py\python.exe", rf"C:\py\python.exe {PACK / 'runtime'} doctor"),
        (r"C:\my py\python.exe", rf'"C:\my py\python.exe" {PACK / "runtime"} doctor (in PowerShell with & before it)'),
    ],
)
def test_windows_quotes_in_its_own_way(python, line, monkeypatch):
    monkeypatch.setattr(shell, "IS_WINDOWS", True)
    monkeypatch.setattr(shell.sys, "executable", python)

    assert shell.for_shell("python -m runtime doctor") == line
