import json
from pathlib import Path

import pytest

from runtime.engines.base import DecodeStep, PrefillStep, StopEntry
from runtime.engines.server.wire import MAX_EVENT_BYTES, ReplyReader, ServerEvent, SseDecoder, error_of
from runtime.errors import ContextOverflow, ModelNotFound, ServerError
from runtime.events import Finish

STREAMS = Path(__file__).parents[3] / "streams"
EOS = StopEntry(id=2, text="<|im_end|>", source="tokenizer")
ENDPOINTS = {"completions": "completions", "chat": "chat", "native": "native"}
WHOLE = sorted(path.name for path in STREAMS.glob("*.sse") if "killed" not in path.name)
ERRORS = json.loads((STREAMS / "errors.json").read_text())


def endpoint_of(name):
    return next(endpoint for word, endpoint in ENDPOINTS.items() if word in name)


def read(name, *pieces):
    """The steps of a stream that came in these pieces, the end included."""
    reader, decoder = ReplyReader(endpoint_of(name), stop=(EOS,), stop_strings=("aris",), max_tokens=8), SseDecoder()
    steps = []
    for piece in pieces:
        for event in decoder.push(piece):
            steps += reader.push(event)
    for event in decoder.flush():
        steps += reader.push(event)
    return [*steps, reader.end()]


def text_of(steps):
    return "".join(step.text for step in steps if isinstance(step, DecodeStep))


@pytest.mark.parametrize("name", WHOLE)
def test_a_stream_cut_at_any_byte_gives_the_same_steps(name):
    data = (STREAMS / name).read_bytes()
    whole = read(name, data)

    for at in range(len(data)):
        assert read(name, data[:at], data[at:]) == whole
    assert read(name, *(bytes([byte]) for byte in data)) == whole


@pytest.mark.parametrize("name", WHOLE)
def test_line_ends_and_comments_and_names_change_nothing(name):
    data = (STREAMS / name).read_bytes()
    whole = read(name, data)

    assert read(name, data.replace(b"\n", b"\r\n")) == whole
    assert read(name, *(bytes([byte]) for byte in data.replace(b"\n", b"\r\n"))) == whole
    assert read(name, data.replace(b"\n", b"\r")) == whole
    assert read(name, data.replace(b"\n\n", b"\nid: 7\nretry: 10\n\n: keep-alive\n\n")) == whole


@pytest.mark.parametrize("name", WHOLE)
def test_a_stream_that_ends_before_its_finish_reason_raises_and_never_gives_a_part_as_whole(name):
    data = (STREAMS / name).read_bytes()
    whole = text_of(read(name, data))

    for at in range(len(data)):
        try:
            steps = read(name, data[:at])
        except ServerError as error:
            assert "broke off" in str(error)
        else:
            assert text_of(steps) == whole
            assert at > data.rindex(b"finish_reason") if b"finish_reason" in data else data.rindex(b'"stop":true')


def test_a_recorded_completion_gives_text_ids_and_a_length_finish():
    steps = read("completions", (STREAMS / "vllm-completions-ids.sse").read_bytes())

    assert [step.token_ids for step in steps] == [(7042,), (30,), (198,), (198,)]
    assert text_of(steps) == " Paris.\n\n"
    assert steps[-1].finish == Finish(reason="length", by="max_tokens")


def test_usage_is_in_the_last_step():
    steps = read("chat", (STREAMS / "vllm-chat-eos.sse").read_bytes())

    assert steps[-1].details == {"num_prompt_tokens": 37, "num_output_tokens": 8}
    assert steps[-1].finish == Finish(reason="stop", by="server")


def test_the_stop_string_that_the_server_cut_off_comes_back_with_the_finish():
    steps = read("completions", (STREAMS / "vllm-completions-stop-string.sse").read_bytes())

    assert text_of(steps) == " Paris"
    assert steps[-1].finish == Finish(reason="stop", by="string", text="aris")


def test_a_stop_reason_that_nobody_asked_for_is_not_put_into_the_text():
    data = b'data: {"choices":[{"text":"x","finish_reason":"stop","stop_reason":"end_turn"}]}\n\n'

    steps = read("completions", data)

    assert text_of(steps) == "x"
    assert steps[-1].finish == Finish(reason="stop", by="server")


def test_a_stop_token_is_named_with_its_text():
    data = b'data: {"choices":[{"text":"","token_ids":[2],"finish_reason":"stop","stop_reason":null}]}\n\n'

    assert read("completions", data)[-1].finish == Finish(reason="stop", by="token", id=2, text="<|im_end|>")


def test_llamacpp_tells_prompt_progress_and_cached_tokens():
    data = b'data: {"content":"","tokens":[],"prompt_progress":{"total":9,"cache":4,"processed":6,"time_ms":1}}\n\n'
    steps = read("native", data, (STREAMS / "llamacpp-native.sse").read_bytes())

    assert steps[0] == PrefillStep(num_done=6, num_total=9, num_cached=4)
    assert steps[-1].details["num_cached_tokens"] == 4
    assert steps[-1].details["num_output_tokens"] == 4


def test_an_error_event_in_a_good_stream_raises_what_the_server_said():
    with pytest.raises(ServerError, match=r"\(?.*EngineCore encountered an issue"):
        read("completions", (STREAMS / "vllm-engine-killed.sse").read_bytes())


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_of_old_and_new_servers_is_told_apart(field):
    data = b'data: {"choices":[{"delta":{"%s":"hm","content":null}}]}\n\n' % field.encode()
    end = b'data: {"choices":[{"delta":{"content":"yes"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

    steps = read("chat", data + end)

    assert [(step.thinking, step.text) for step in steps] == [("hm", ""), ("", "yes")]


@pytest.mark.parametrize(
    "data",
    [
        b"data: not json",
        b"data: [1]",
        b'data: "text"',
        b'data: {"choices": 5}',
        b'data: {"choices": [5]}',
        b'data: {"choices": [{"delta": {"content": 5}}]}',
        b'data: {"choices": [{"delta": {"content": "a"}, "token_ids": ["x"]}]}',
        b'data: {"choices": [{"delta": {}, "finish_reason": "content_filter"}]}',
        b"data: \xff\xfe",
        b"data: " + b"[" * 100_000,
        b"event: error\ndata: {}",
    ],
)
def test_nonsense_is_a_server_error(data):
    with pytest.raises(ServerError):
        read("chat", data + b"\n\n")


def test_an_endless_line_is_refused():
    decoder = SseDecoder()

    with pytest.raises(ServerError, match="one event of over"):
        for _ in range(MAX_EVENT_BYTES // 1_000_000 + 1):
            decoder.push(b"x" * 1_000_000)


def test_data_lines_are_joined_and_other_separators_are_text():
    decoder = SseDecoder()
    data = "\ufeffevent: a\ndata: 1\u2028\x0b\x85\ndata:2\n\n".encode()

    assert decoder.push(data) == [ServerEvent("a", "1\u2028\x0b\x85\n2")]


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_recorded_refusal_is_one_sentence_of_the_right_kind(name):
    sample = ERRORS[name]

    error = error_of(sample["status"], sample["body"])

    expected = ContextOverflow if "too-long" in name or "over-context" in name else ServerError
    expected = ModelNotFound if "unknown-model" in name else expected
    assert type(error) is expected
    assert len(str(error)) < 500


def test_an_endless_count_is_an_event_of_a_wrong_shape():
    data = '{"prompt_progress": {"processed": Infinity, "total": 1, "cache": 0}}'

    with pytest.raises(ServerError, match="wrong shape"):
        ReplyReader("native").push(ServerEvent("", data))
