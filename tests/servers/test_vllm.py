"""The server engine against a real vLLM on the CPU: one server for all tests, killed in the last ones."""

import json
import os
import signal
import subprocess
import urllib.request
from dataclasses import replace

import pytest

from runtime import GREEDY, Prompt, profiles
from runtime.engines.base import DecodeStep, Work
from runtime.errors import ServerError
from runtime.models.info import read_model
from runtime.prompting.prompter import Prompter
from runtime.serving import Card, Wish, plan
from tests.nodes.conftest import generate, load_llm, prompt_node
from tests.servers import every_server
from tests.servers.asking import ask, begin, drain, results

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
def server(vllm):
    return vllm


globals().update(every_server.PROMISES)


def test_greedy_text_agrees_with_transformers_on_the_first_32_tokens(spec, runtime, model_path):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    prompter = Prompter.load(str(model_path))
    the_spec = spec()

    with runtime.lease(the_spec) as engine:
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
    events = begin(runtime, spec(between_tokens_s=5.0), max_tokens=1500)
    os.kill(vllm.pids("api_server")[0], signal.SIGTERM)

    with pytest.raises(ServerError, match=r"no further token within 5 s|EngineCore|broke"):
        drain(events)

    vllm.stop()
    with pytest.raises(ServerError, match="cannot be reached"):
        results(runtime, spec(between_tokens_s=5.0), ask("x"))
    vllm.start()
    [result] = results(runtime, spec(between_tokens_s=5.0), ask(QUESTIONS[0]))
    assert result.text == "The capital of France is Paris."


def test_an_engine_killed_in_mid_stream_raises_what_the_server_says(spec, runtime, vllm):
    """vLLM sends an error event and then [DONE], as if all were well."""
    vllm.start_if_down()
    events = begin(runtime, spec(), max_tokens=1500)
    os.kill(vllm.pids("EngineCore")[0], signal.SIGKILL)

    with pytest.raises(ServerError, match="EngineCore"):
        drain(events)


def test_a_server_killed_in_mid_stream_never_gives_a_part_as_whole(spec, runtime, vllm):
    """SIGKILL closes the socket without a word."""
    vllm.start_if_down()
    events = begin(runtime, spec(), max_tokens=1500)
    os.kill(vllm.pids("api_server")[0], signal.SIGKILL)

    with pytest.raises(ServerError, match="broke"):
        drain(events)
