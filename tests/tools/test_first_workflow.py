"""What `make run` runs, in the real server with the real model."""

from __future__ import annotations

import json

import pytest

from tests.host.comfy import ComfyUI
from tools.run import FIRST_WORKFLOW, Printer, read_prompt, show


@pytest.mark.server
def test_the_first_workflow_prints_its_text_live_and_then_the_same_text_and_a_report(
    comfy: ComfyUI, capsys: pytest.CaptureFixture[str]
):
    prompt = read_prompt(FIRST_WORKFLOW)
    (generate,) = [node for node in prompt if prompt[node]["class_type"] == "ResidentGenerate"]
    prompt[generate]["inputs"]["max_tokens"] = 12

    run = comfy.run_prompt(prompt, on_event=Printer())
    live = capsys.readouterr().out
    show(run)

    (text,) = run.outputs[generate]["text"]
    report = json.loads(run.outputs[generate]["report"][0])
    assert text and run.streamed(generate) == text
    assert text in live
    assert f"-- node {generate}, text:\n{text}\n" in capsys.readouterr().out
    assert report["num_output_tokens"] == 12
    assert report["finish"]["reason"] == "length"
