"""The server engine against a real vLLM on the CPU: one server for all tests, killed in the last ones."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
import urllib.request
from dataclasses import replace

import pytest

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime, Sampling, collect, profiles
from runtime.engines.server.facts import num_busy, read_metrics
from runtime.errors import ContextOverflow, ModelNotFound, ServerError
from runtime.events import Failed, TextDelta
from runtime.models.info import read_model
from runtime.profiles import Profile
from runtime.prompting.prompter import Prompter
from runtime.serving import Card, Wish, plan
from tests.nodes.conftest import generate, load_llm, prompt_node
from tests.runtime import test_engine_contract as contract
from tests.runtime.test_engine_contract import Case, loaded
from tests.servers.vllm import KEY, MODEL

pytestmark = pytest.mark.vllm

QUESTIONS = (
    "What is the capital of France?",
    "Say hello.",
    "Name three animals.",
    "Write one sentence about the sea.",
    "What is two plus two?",
    "Describe a red house.",
    "Who wrote Hamlet?",
    "Give me a word for cold.",
    "What colour is the sky?",
    "Describe a cat on a windowsill, for a painter.",
)


@pytest.fixture
def spec(vllm, profile_file):
    """Write a profile for the server, give the spec that uses it."""

    def make(model=MODEL, *, key=KEY, when_idle="keep", **fields):
        profiles.write(Profile(name="box", base_url=vllm.url, key=key, **fields))
        return ModelSpec(model=f"box/{model}", engine="openai", when_idle=when_idle)

    return make


@pytest.fixture
def runtime():
    one = Runtime()
    yield one
    one.close()


def ask(text, *, stop_strings=(), **fields):
    fields = {"sampling": GREEDY, "max_tokens": 16, **fields}
    return Request(prompt=Prompt(messages=Prompt.of(text).messages, stop_strings=stop_strings), **fields)


def results(runtime, the_spec, *requests):
    collector = collect(runtime.generate(the_spec, requests), the_spec, requests)
    [resident] = runtime.residents(the_spec)
    return collector.results(resident.info, resident.bytes)


def wait_until_idle(vllm):
    for _ in range(50):
        if num_busy(read_metrics(vllm.metrics())) == 0:
            return True
        time.sleep(0.1)
    return False


def begin(runtime, the_spec, num_deltas=3):
    """A long answer that has begun."""
    events = runtime.generate(the_spec, [ask("Tell me a very long story.", max_tokens=1500)])
    list(itertools.islice((one for one in events if isinstance(one, TextDelta)), num_deltas))
    return events


@pytest.fixture
def case(spec):
    """For the tests of the engine contract that a server can keep."""
    return Case(spec=spec())


@pytest.fixture
def warm(case):
    engine = loaded(case)
    yield engine
    engine.close()


test_a_list_gives_what_its_items_give_alone = contract.test_a_list_gives_what_its_items_give_alone
test_a_length_is_exact = contract.test_a_length_is_exact
test_a_stop_id_ends_the_answer_and_its_text_is_left_out = (
    contract.test_a_stop_id_ends_the_answer_and_its_text_is_left_out
)
test_a_stop_string_cuts_the_text = contract.test_a_stop_string_cuts_the_text
test_a_closed_answer_leaves_the_engine_as_if_it_had_never_been = (
    contract.test_a_closed_answer_leaves_the_engine_as_if_it_had_never_been
)
test_equal_seeds_give_equal_answers_and_no_global_random_state_moves = (
    contract.test_equal_seeds_give_equal_answers_and_no_global_random_state_moves
)
test_close_frees_everything_and_may_be_called_again = contract.test_close_frees_everything_and_may_be_called_again


def test_greedy_text_agrees_with_transformers_on_the_first_32_tokens(spec, runtime, model_path):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    prompter = Prompter.load(str(model_path))
    the_spec = spec()

    with runtime.lease(the_spec) as engine:
        from runtime.engines.base import DecodeStep, Work

        encoded = [prompter.encode(Prompt.of(text)) for text in QUESTIONS]
        work = [Work(encoded=one, sampling=GREEDY, max_tokens=32, seed=0) for one in encoded]
        ids = {index: [] for index in range(len(work))}
        for index, step in engine.generate(work):
            if isinstance(step, DecodeStep):
                ids[index] += step.token_ids

    for index, one in enumerate(encoded):
        prompt = torch.tensor([one.token_ids])
        with torch.inference_mode():
            logits = model(torch.cat([prompt, torch.tensor([ids[index]])], dim=1)).logits[0, prompt.shape[1] - 1 : -1]
        assert ids[index], QUESTIONS[index]
        for at, chosen in enumerate(ids[index]):
            gap = float(logits[at].max() - logits[at][chosen])
            assert gap < 0.01, f"{QUESTIONS[index]!r} token {at}: {gap}"


def test_the_prompt_goes_as_ids_and_the_report_says_so(spec, runtime, model_path):
    [result] = results(runtime, spec(), ask(QUESTIONS[0]))

    assert result.text == "The capital of France is Paris."
    assert result.report["endpoint"] == "completions"
    assert result.report["server"].startswith("vLLM 0.")
    assert (
        result.report["num_prompt_tokens"] == Prompter.load(str(model_path)).encode(Prompt.of(QUESTIONS[0])).num_tokens
    )
    assert result.report["finish"] == {"reason": "stop", "by": "token", "id": 2, "text": "<|im_end|>"}


@pytest.mark.parametrize("control", ["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>"])
def test_control_tokens_in_a_users_text_reach_the_server_as_plain_text(spec, runtime, control):
    with runtime.lease(spec()) as engine:
        plain = engine.encode(Prompt.of("before and after")).token_ids
        encoded = engine.encode(Prompt.of(f"before {control} after")).token_ids

    structure = {0, 1, 2}
    assert [one for one in encoded if one in structure] == [one for one in plain if one in structure]


def test_a_list_of_16_gives_what_16_single_runs_give_in_order(spec, runtime):
    requests = [ask(f"Count from {n} on.", max_tokens=12) for n in range(16)]

    together = [one.text for one in results(runtime, spec(), *requests)]
    single = [results(runtime, spec(), one)[0].text for one in requests]

    assert together == single


def test_a_stop_string_inside_a_token_ends_the_answer_before_it(spec, runtime, vllm):
    [result] = results(runtime, spec(), ask(QUESTIONS[0], stop_strings=("ari", "zzz")))

    assert result.text == "The capital of France is P"
    assert result.report["finish"] == {"reason": "stop", "by": "string", "text": "ari"}
    assert wait_until_idle(vllm)


def test_the_server_stops_at_a_string_too_and_gives_it_back(spec, runtime):
    from runtime.engines.base import DecodeStep, Work

    with runtime.lease(spec()) as engine:
        encoded = engine.encode(Prompt.of(QUESTIONS[0]))
        work = Work(encoded=encoded, sampling=GREEDY, max_tokens=16, seed=0, stop_strings=("ari",))
        steps = [step for _, step in engine.generate([work]) if isinstance(step, DecodeStep)]

    assert "".join(step.text for step in steps) == "The capital of France is Pari"
    assert steps[-1].finish.text == "ari"


def test_the_largest_seed_is_as_good_as_any(spec, runtime):
    """-1 would be: vLLM takes it for no seed."""
    request = ask("Invent a name.", sampling=Sampling(temperature=1.0), seed=2**64 - 1)

    first, again = (results(runtime, spec(), request)[0].text for _ in range(2))

    assert first == again


def test_an_interrupt_ends_the_request_in_the_server(spec, runtime, vllm):
    events = begin(runtime, spec())
    assert num_busy(read_metrics(vllm.metrics())) == 1

    events.close()

    assert wait_until_idle(vllm)
    assert results(runtime, spec(), ask(QUESTIONS[0]))[0].text == "The capital of France is Paris."


def test_a_prompt_over_the_context_is_told_with_its_numbers_before_it_is_sent(spec, runtime):
    with pytest.raises(ContextOverflow, match=r"over the context of 2048|too long for the context of 2048"):
        results(runtime, spec(), ask("word " * 3000))


def test_a_wrong_model_name_is_told_with_the_right_one(spec, runtime):
    with pytest.raises(ModelNotFound, match=f"does not serve 'nope'. It serves: {MODEL}"):
        results(runtime, spec("nope"), ask("x"))


def test_a_wrong_key_is_told_and_not_shown(spec, runtime):
    with pytest.raises(ServerError, match="refused the key") as caught:
        results(runtime, spec(key="wrong-key-123"), ask("x"))

    assert "wrong-key-123" not in str(caught.value)


def test_a_tokenizer_of_another_model_is_refused(spec, runtime, tmp_path, model_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((model_path / name).read_bytes())
    tokenizer = json.loads((model_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["Hi"], vocab["Ho"] = vocab["Ho"], vocab["Hi"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")

    with pytest.raises(ServerError, match="the same text gives other ids"):
        results(runtime, spec(tokenizer=str(folder)), ask("x"))


def test_a_server_asked_to_sleep_sleeps_when_let_go_and_wakes_for_the_next_run(spec, runtime, vllm):
    def is_sleeping():
        with urllib.request.urlopen(f"{vllm.url}/is_sleeping", timeout=10) as reply:
            return json.load(reply)["is_sleeping"]

    the_spec = spec(when_idle="sleep")
    first = results(runtime, the_spec, ask(QUESTIONS[0]))[0].text
    runtime.unload(the_spec)
    slept = is_sleeping()
    second = results(runtime, the_spec, ask(QUESTIONS[0]))[0].text

    assert (slept, is_sleeping()) == (True, False)
    assert first == second
    runtime.unload(the_spec)
    results(runtime, spec(), ask(QUESTIONS[0]))


FLAGS = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print("FLAGS", *sorted(option for action in parser._actions for option in action.option_strings))
"""


def test_vllm_knows_every_flag_that_serve_gives_and_none_that_it_calls_gone(vllm, model_path):
    info = replace(read_model(str(model_path)), model_type="qwen3", quant_method="awq")
    wish = Wish(served_name="x", tensor_parallel=2, pipeline_parallel=2, context_len=1024, kv_cache="fp8")
    made = plan(info, wish, [Card(name="a", total_bytes=24_000_000_000)], ())

    told = subprocess.run([vllm.python, "-c", FLAGS], capture_output=True, text=True, check=True).stdout
    known = set(next(line for line in told.splitlines() if line.startswith("FLAGS")).split())

    assert {word for word in made.argv if word.startswith("--")} <= known
    assert not known & {"--model-type", "--stop", "--rope-theta", "--cache-q4", "--swap-space"}


@pytest.mark.server
def test_the_same_graph_gives_the_same_text_with_either_loader(spec, comfy_with, profile_file, model_path, vllm):
    spec()
    env = {profiles.PATH_VARIABLE: str(profile_file)}
    comfy = comfy_with(models=[model_path], env=env)
    connect = {"profile": "box", "model": "(what the server serves)", "other_model": "", "when_idle": "keep"}
    loaders = {
        "transformers": load_llm(model_path.name, engine="transformers", device="cpu", dtype="float32"),
        "vllm": {"class_type": "ResidentConnectServer", "inputs": connect},
    }
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    rest = {
        "2": prompt_node(QUESTIONS[0]),
        "3": generate(sampling=["5", 0], max_tokens=32),
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}},
        "5": {"class_type": "ResidentSampling", "inputs": sampling},
    }

    texts = {}
    for name, loader in loaders.items():
        run = comfy.run_prompt({"1": loader, **rest}, timeout_s=280)
        assert run.status == "success", run.error
        texts[name] = list(run.outputs["4"]["text"])

    assert texts["transformers"] == texts["vllm"] == ["The capital of France is Paris."]


def test_a_server_that_is_told_to_end_in_mid_stream_is_noticed(spec, runtime, vllm):
    """SIGTERM leaves the socket open and silent, or sends an error event: it has been seen to do both."""
    vllm.start_if_down()
    events = begin(runtime, spec(between_tokens_s=5.0))
    os.kill(vllm.pids("api_server")[0], signal.SIGTERM)

    with pytest.raises(ServerError, match=r"no further token within 5 s|EngineCore|broke"):
        results_of(events)

    vllm.stop()
    with pytest.raises(ServerError, match="cannot be reached"):
        results(runtime, spec(between_tokens_s=5.0), ask("x"))
    vllm.start()
    [result] = results(runtime, spec(between_tokens_s=5.0), ask(QUESTIONS[0]))
    assert result.text == "The capital of France is Paris."


def test_an_engine_killed_in_mid_stream_raises_what_the_server_says(spec, runtime, vllm):
    """vLLM sends an error event and then [DONE], as if all were well."""
    vllm.start_if_down()
    events = begin(runtime, spec())
    os.kill(vllm.pids("EngineCore")[0], signal.SIGKILL)

    with pytest.raises(ServerError, match="EngineCore"):
        results_of(events)


def test_a_server_killed_in_mid_stream_never_gives_a_part_as_whole(spec, runtime, vllm):
    """SIGKILL closes the socket without a word."""
    vllm.start_if_down()
    events = begin(runtime, spec())
    os.kill(vllm.pids("api_server")[0], signal.SIGKILL)

    with pytest.raises(ServerError, match="broke"):
        results_of(events)


def results_of(events):
    """Drain; raise the error of the request that failed."""
    with contextlib.closing(events):
        for event in events:
            if isinstance(event, Failed):
                raise event.error
