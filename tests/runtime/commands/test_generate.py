import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def command(*words, **options):
    args = [f"--option={name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "runtime", "generate", "script", "--engine", "scripted", *words, *args]


def generate(*words, stdin=None, **options):
    return subprocess.run(command(*words, **options), cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=60)


def test_text_goes_to_stdout_and_thinking_to_stderr():
    done = generate("--prompt", "a cat", reply="<think>hm, {prompt}</think>A cat on a wall.")

    assert (done.returncode, done.stdout) == (0, "A cat on a wall.\n")
    assert done.stderr.startswith("hm, a cat\n[")


def test_json_is_one_object_with_text_thinking_and_report():
    done = generate("--prompt", "x", "--seed", "7", "--json", reply="<think>hm</think>yes")

    answer = json.loads(done.stdout)
    assert list(answer) == ["text", "thinking_text", "report"]
    assert (answer["text"], answer["thinking_text"]) == ("yes", "hm")
    assert answer["report"]["finish"]["reason"] == "stop"
    assert answer["report"]["seed"] == 7
    assert done.stderr == ""


def test_the_system_message_and_a_prompt_from_stdin_reach_the_model():
    done = generate("--prompt", "-", "--system", "Be brief.", "--json", stdin="from a pipe")

    answer = json.loads(done.stdout)
    assert answer["text"] == "You said: from a pipe"
    assert answer["report"]["num_prompt_tokens"] == len("<system>Be brief.<user>from a pipe<assistant>")


def test_max_tokens_is_exact():
    assert generate("--prompt", "x", "--max-tokens", "5", reply="abcdefgh").stdout == "abcde\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prompt", " "], "The prompt holds no user text."),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it runs from 0 (greedy) to 100."),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens is 0;"),
        (["--prompt", "x" * 90, "--context-len", "64"], "Prompt of 107 tokens is 44 too long for the context of 64"),
        (["--prompt", "x", "--engine", "nope"], "There is no engine 'nope'."),
    ],
)
def test_a_fault_is_a_sentence_on_stderr_and_exit_code_1(words, sentence):
    done = generate(*words)

    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_request_that_fails_midway_keeps_its_text_and_says_why():
    done = generate("--prompt", "x", reply="abcdef", fail_at=4)

    assert (done.returncode, done.stdout) == (1, "abc\n")
    assert done.stderr == "step 4 failed by script.\n"


@pytest.mark.parametrize("words", [[], ["--prompt"], ["--prompt", "x", "--option", "novalue"], ["--nope"]])
def test_wrong_usage_is_exit_code_2(words):
    assert generate(*words).returncode == 2


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_cancels_quietly_with_130():
    running = subprocess.Popen(
        command("--prompt", "x", reply="y" * 1000, step_s=0.02),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    running.stdout.read(3)

    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)

    assert running.returncode == 130
    assert set(out) <= {"y", "\n"}
    assert err == ""


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is told otherwise there")
def test_a_closed_pipe_is_quiet():
    running = subprocess.Popen(
        command("--prompt", "x", reply="y" * 1000, step_s=0.01),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    running.stdout.read(3)

    running.stdout.close()

    assert running.stderr.read() == b""
    assert running.wait(timeout=60) == 141


def test_a_real_model_streams_the_text_that_json_gives_at_the_same_seed(model_path):
    pytest.importorskip("transformers")
    words = ["generate", str(model_path), "--prompt", "Name three colors.", "--max-tokens", "12", "--seed", "7"]
    python = [sys.executable, "-m", "runtime", *words]

    streamed = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=600)
    whole = subprocess.run([*python, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=600)

    answer = json.loads(whole.stdout)
    assert streamed.stdout == answer["text"] + "\n"
    assert answer["report"]["engine"] == "transformers"
    assert answer["report"]["finish"] == {"reason": "length", "by": "max_tokens"}
    assert streamed.stderr.startswith("[12 tokens, ")
