import json
import os

import pytest

from runtime.__main__ import main
from runtime.commands import bench
from runtime.runtime import Runtime

SIZE = ["--engine", "scripted", "--contexts", "64,128", "--output-tokens", "8", "--repeats", "1", "--warmup", "0"]


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    one = Runtime()
    monkeypatch.setattr(bench, "get", lambda: one)
    yield one
    one.close()


def test_rows_are_printed_and_written_with_their_environment(tmp_path, capsys):
    file, plot = tmp_path / "rows.json", tmp_path / "plot.png"

    code = main(["bench", "one", "two", *SIZE, "--json", str(file), "--plot", str(plot)])

    told = json.loads(file.read_text())
    assert code == 0
    assert [(row["model"], row["num_prompt_tokens"]) for row in told["rows"]] == [
        ("one", 64), ("two", 64), ("one", 128), ("two", 128),
    ]  # fmt: skip
    assert told["environment"]["python"]
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_two_files_are_compared(tmp_path, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    main(["bench", "one", *SIZE, "--json", str(files[0])])
    told = json.loads(files[0].read_text())
    for row in told["rows"]:
        row["ttft_cold_s"] *= 100
    files[1].write_text(json.dumps(told))
    capsys.readouterr()

    code = main(["bench", "compare", *map(str, files)])

    assert code == 0
    assert capsys.readouterr().out.count("ttft_cold_s") == 2


def test_a_row_with_an_error_makes_the_command_fail(capsys):
    code = main(["bench", "one", *SIZE, "--output-tokens", "4000"])

    assert code == 1
    assert "! one: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "a.json"], "compare takes two files, and 1 are given."),
        (["compare", "no.json", "no.json"], "is no file of benchmark rows"),
        (["one", *SIZE, "--repeats", "0"], "The benchmark's repeats is 0; it starts at 1."),
    ],
)
def test_what_makes_no_sense_is_told_in_a_sentence(capsys, arguments, sentence):
    assert main(["bench", *arguments]) == 1
    assert sentence in capsys.readouterr().err


def test_quality_compares_with_the_first_model(tmp_path, capsys):
    file = tmp_path / "quality.json"

    code = main(["bench", "one", "two", *SIZE, "--quality", "--json", str(file)])

    rows = json.loads(file.read_text())["rows"]
    assert code == 0
    assert [(row["num_prompts"], row["agreement"]) for row in rows] == [(25, 1.0), (25, 1.0)]
    assert "same text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--json", "gone/rows.json"], "--json gone/rows.json cannot be written: there is no folder gone"),
        (["--plot", "gone/plot.png"], "--plot gone/plot.png cannot be written: there is no folder gone"),
        (["--json", "folder"], "--json folder is there already and is no file."),
        (["--json", "pipe"], "--json pipe is there already and is no file."),
        (["--plot", "plot.xyz"], "--plot plot.xyz is no .png file."),
    ],
)
def test_results_that_cannot_be_written_are_told_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runtime.commands.bench.run_benchmark", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")

    assert main(["bench", "m", "--engine", "scripted", *arguments]) == 1
    assert capsys.readouterr().err.startswith(sentence)
