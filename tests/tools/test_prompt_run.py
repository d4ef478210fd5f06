"""Putting a prompt's events together."""

from __future__ import annotations

import struct

from tools.prompt_run import Event, PromptRun, parse_binary


def delta(text: str, **fields: object) -> Event:
    return Event("resident.stream", {"node": "4", "index": 0, "channel": "answer", "delta": text, **fields})


def test_a_binary_text_message_gives_its_node_and_text():
    message = struct.pack(">II", 3, 3) + b"1:5" + "n\u00e9 42 %".encode()

    assert parse_binary(message) == Event("progress_text", {"node": "1:5", "text": "n\u00e9 42 %"})


def test_a_preview_image_gives_only_its_kind_and_size():
    assert parse_binary(struct.pack(">I", 1) + b"jpeg") == Event("binary", {"kind": 1, "num_bytes": 4})


def test_streamed_text_is_put_together_by_node_item_and_channel():
    run = PromptRun()
    for event in (
        delta("A ca"),
        delta("x", node="5"),
        delta("y", index=1),
        delta("hm", channel="thinking"),
        delta("t."),
    ):
        run.take(event)

    assert run.streamed("4") == "A cat."
    assert run.streamed("4", channel="thinking") == "hm"
    assert run.streamed("4", 1) == "y"


def test_a_snapshot_takes_the_place_of_what_was_streamed_before():
    run = PromptRun()
    for event in (delta("lost"), delta("whole", is_snapshot=True), delta(" text")):
        run.take(event)

    assert run.streamed("4") == "whole text"


def test_an_error_event_ends_the_run_with_its_data():
    run = PromptRun()

    run.take(Event("execution_error", {"node_id": "1", "exception_message": "No model."}))

    assert run.status == "error"
    assert run.error == {"node_id": "1", "exception_message": "No model."}
