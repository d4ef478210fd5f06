"""What `make run` reads and prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.fault import Fault
from tools.prompt_run import Event, PromptRun
from tools.run import Printer, read_prompt, show


def stream(phase: str, delta: str = "", status: str = "", done: bool = False, **more: object) -> Event:
    place = {"node": "4", "index": 0, "channel": "answer"}
    return Event("resident.stream", {**place, "phase": phase, "delta": delta, "status": status, "done": done, **more})


def test_the_text_is_printed_as_it_grows_between_the_status_lines(capsys: pytest.CaptureFixture[str]):
    printer = Printer()

    for event in (
        stream("load", status="loading 0 %"),
        stream("load", status="loading 50 %"),
        stream("prefill", status="prefill 0 of 9"),
        stream("decode", "A ca"),
        stream("decode", "t"),
        stream("decode", ".", "3 tokens, stop", done=True),
    ):
        printer(event)

    assert capsys.readouterr().out == "[loading 0 %]\n[prefill 0 of 9]\nA cat.\n[3 tokens, stop]\n"


def test_a_snapshot_adds_only_what_was_not_printed(capsys: pytest.CaptureFixture[str]):
    printer = Printer()

    for event in (stream("decode", "A c"), stream("decode", "A cat", is_snapshot=True), stream("decode", ".")):
        printer(event)

    assert capsys.readouterr().out == "A cat."


def test_items_and_thinking_stand_on_lines_of_their_own(capsys: pytest.CaptureFixture[str]):
    printer = Printer()

    for event in (
        stream("decode", "Hm.", channel="thinking"),
        stream("decode", "A cat."),
        stream("decode", "A dog.", index=1),
    ):
        printer(event)

    assert capsys.readouterr().out == "Hm.\nA cat.\nA dog."


def test_outputs_are_printed_with_json_laid_out(capsys: pytest.CaptureFixture[str]):
    show(PromptRun(status="success", outputs={"4": {"text": ["A cat."], "report": ['{"seed": 1}']}}))

    assert capsys.readouterr().out == '-- node 4, text:\nA cat.\n-- node 4, report:\n{\n  "seed": 1\n}\n'


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (
            PromptRun(
                status="error", error={"node_id": "1", "node_type": "ResidentLoadLLM", "exception_message": "No.\n"}
            ),
            r"Node 1 \(ResidentLoadLLM\) failed: No\.$",
        ),
        (PromptRun(status="rejected", error={"error": "no outputs"}), "refused the prompt: .*no outputs"),
        (PromptRun(status="interrupted"), "ended as interrupted"),
    ],
)
def test_a_run_that_did_not_end_well_is_a_fault(run: PromptRun, told: str):
    with pytest.raises(Fault, match=told):
        show(run)


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "There is no prompt"), ("{", "is not JSON"), ('{"nodes": []}', r"Export \(API\)"), ("{}", "API-format")],
)
def test_a_file_that_is_no_prompt_is_told(tmp_path: Path, content: str | None, told: str):
    path = tmp_path / "prompt.json"
    if content is not None:
        path.write_text(content)

    with pytest.raises(Fault, match=told):
        read_prompt(path)
