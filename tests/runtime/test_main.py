import subprocess
import sys
from pathlib import Path

import pytest

from runtime import commands
from runtime.__main__ import main

PACK = Path(__file__).parents[2]


def test_help_lists_every_command_with_its_sentence(capsys):
    assert main(["--help"]) == 0

    out = capsys.readouterr().out
    for name in commands.names():
        assert f"  {name}" in out
        assert commands.load(name).HELP in out


def test_no_command_is_wrong_usage(capsys):
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_those_there_are(capsys):
    assert main(["chat"]) == 2
    names = ", ".join(commands.names())
    assert capsys.readouterr().err == f"There is no command 'chat'. Commands are: {names}.\n"


@pytest.mark.parametrize("name", commands.names())
def test_a_command_says_in_one_sentence_what_it_does(name):
    assert commands.load(name).HELP.endswith(".")


@pytest.mark.parametrize("name", commands.names())
def test_a_command_explains_its_options(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])

    assert ended.value.code == 0
    assert f"python -m runtime {name}" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_a_fault_told_in_a_sentence(monkeypatch, capsys):
    def run(args):
        raise FileNotFoundError(2, "No such file or directory", "turns.jsonl")

    monkeypatch.setattr(commands.load("inspect"), "run", run)

    assert main(["inspect", "m"]) == 1
    assert capsys.readouterr().err == "turns.jsonl: No such file or directory.\n"


@pytest.mark.parametrize("step", ["load", "names"])
def test_ctrl_c_before_the_command_begins_leaves_no_trace(step, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, step, interrupted)

    assert main(["inspect", "m"]) == 130
    assert capsys.readouterr().err == ""


INTERRUPTED = """
import builtins, runpy, sys
whole = builtins.__import__

def interrupted(name, *rest, **named):
    if name == "argparse":
        raise KeyboardInterrupt
    return whole(name, *rest, **named)

builtins.__import__ = interrupted
sys.argv = sys.argv[1:]
"""


@pytest.mark.parametrize("start", ["run_module", "run_path"])
def test_ctrl_c_while_the_modules_are_read_leaves_no_trace(start):
    code = f"{INTERRUPTED}runpy.{start}('runtime', run_name='__main__')"

    done = subprocess.run([sys.executable, "-c", code, "x", "doctor"], cwd=PACK, capture_output=True, text=True)

    assert (done.returncode, done.stderr, done.stdout) == (130, "", "")


@pytest.mark.parametrize("options", [[], ["-I"]], ids=["plain", "isolated, as in the portable Windows build"])
def test_the_folder_runs_as_a_file_does_from_any_other_folder(tmp_path, options):
    words = [sys.executable, *options, str(PACK / "runtime"), "profiles", "list"]

    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "local-vllm" in done.stdout


def test_a_shell_that_closed_stdout_is_no_fault(monkeypatch):
    monkeypatch.setattr(commands.load("inspect"), "run", lambda args: 0)
    monkeypatch.setattr("sys.stdout", None)

    assert main(["inspect", "m"]) == 0
