"""What a hand-written prompt, or a switch of another pack, can put where a value of another kind belongs."""

import pytest

WRONG = [True, 5, 0.5, "zzz", {"a": 1}, [1, 2]]


@pytest.fixture
def nodes(pack):
    """The nodes, by what they take a model or a prompt for."""
    benchmark, prompt, memory = pack("nodes.benchmark"), pack("nodes.prompt"), pack("nodes.memory")
    widgets = {"contexts": ["256"], "output_tokens": [4], "repeats": [1], "warmup": [0], "batch_sizes": ["1"]}
    widgets |= {"kv_caches": ["auto"], "check": [False], "with_stage": [False]}
    spec = pack("runtime").ModelSpec(model="m")
    return {
        ("benchmark", "llm"): lambda value: benchmark.Benchmark.execute(llm=[value], **widgets),
        ("benchmark", "llm_3"): lambda value: benchmark.Benchmark.execute(llm=[spec], llm_3=[value], **widgets),
        ("prompt", "llm"): lambda value: prompt.LLMPrompt.execute("", "u", llm=value),
        ("prompt", "history"): lambda value: prompt.LLMPrompt.execute("", "u", history=value, history_answer="a"),
        ("free", "llm"): lambda value: memory.Free.execute(True, llm=value),
    }


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize(
    "socket",
    [("benchmark", "llm"), ("benchmark", "llm_3"), ("prompt", "llm"), ("prompt", "history"), ("free", "llm")],
    ids="-".join,
)
def test_a_socket_with_a_value_of_another_kind_says_what_to_wire_in(nodes, socket, value):
    with pytest.raises(ValueError, match=rf"^{socket[1]} is a value of the kind {type(value).__name__}. Wire in "):
        nodes[socket](value)


@pytest.mark.parametrize("value", [True, 5, {"a": 1}, [1, 2]], ids=str)
def test_a_menu_with_a_value_that_is_no_text_is_told_before_the_run(pack, value):
    prompt, server = pack("nodes.prompt").LLMPrompt, pack("nodes.server").ConnectServer
    kind = type(value).__name__

    assert prompt.validate_inputs(preset=value).startswith(f"preset is a value of the kind {kind}.")
    assert prompt.validate_inputs(template=value).startswith(f"template is a value of the kind {kind}.")
    assert server.validate_inputs(profile=value).startswith(f"profile is a value of the kind {kind}.")
    assert prompt.fingerprint_inputs(preset=value, template=value) == []
