"""Residency on a real ComfyUI server, with the scripted engine: what counts here is who loads, evicts and frees."""

import itertools
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

SCRIPTED = {"RESIDENT_LLM_SCRIPTED": "1"}
MODES = {
    "classic": ("--cache-classic",),
    "lru": ("--cache-lru", "20"),
    "none": ("--cache-none",),
    "ram": ("--cache-ram",),
}
_words = (f"word{number}" for number in itertools.count())


def load(**inputs):
    fields = {
        "model": "SmolLM2-135M-Instruct",
        "engine": "scripted",
        "device": "auto",
        "dtype": "auto",
        "attention": "auto",
        "context_len": 0,
        "kv_cache": "auto",
        "when_idle": "keep",
        "host_copy_gb": -1.0,
    }
    return {"class_type": "ResidentLoadLLM", "inputs": {**fields, **inputs}}


def generate(llm, prompt=None, max_tokens=32):
    fields = {"max_tokens": max_tokens, "seed": 0, "thinking_budget": 0, "on_cut_thinking": "error"}
    inputs = {"llm": [llm, 0], "prompt": prompt or next(_words), **fields}
    return {"class_type": "ResidentGenerate", "inputs": inputs}


def free(value, **inputs):
    return {"class_type": "ResidentFree", "inputs": {"value": [value, 0], "drop_host_copies": False, **inputs}}


class Loads:
    """Counts what the server's log says about loading and leaving, since this began."""

    def __init__(self, server):
        self._path = Path(server.log_path)
        self._start = len(self._text())

    def _text(self):
        return self._path.read_text(errors="replace")

    def count(self, words):
        return self._text()[self._start :].count(words)

    @property
    def loads(self):
        return self.count("loaded /") - self.count("unloaded /")

    @property
    def unloads(self):
        return self.count("unloaded /")


@pytest.fixture(params=MODES)
def server(request, comfy_with):
    server = comfy_with(*MODES[request.param], env=SCRIPTED)
    yield server
    server.stop()


@pytest.fixture
def plain(comfy_with):
    return comfy_with(env=SCRIPTED)


def start_empty(server):
    """Nothing is loaded from here on."""
    server.run_prompt({"1": {"class_type": "ResidentFree", "inputs": {"drop_host_copies": True}}})
    return Loads(server)


def wait_until(is_true, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_after_free_the_next_prompt_loads_again_by_itself_in_every_cache_mode(server):
    seen = start_empty(server)

    texts = [server.run_prompt({"1": load(), "2": generate("1", f"{word}")}).outputs["2"]["text"] for word in "ab"]
    loads_before = seen.loads
    server.free()
    wait_until(lambda: seen.unloads)
    texts.append(server.run_prompt({"1": load(), "2": generate("1", "c")}).outputs["2"]["text"])

    assert texts == [["You said: a"], ["You said: b"], ["You said: c"]]
    assert (loads_before, seen.loads, seen.unloads) == (1, 2, 1)


def rss_bytes(server):
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def test_free_gives_the_memory_of_a_real_model_back_and_it_comes_again(plain):
    seen = start_empty(plain)
    real = load(engine="transformers", context_len=512)
    before = rss_bytes(plain)

    first = plain.run_prompt({"1": real, "2": generate("1", "Say hello.", max_tokens=4)}, timeout_s=120)
    held = rss_bytes(plain) - before
    plain.free()
    wait_until(lambda: seen.unloads)
    wait_until(lambda: rss_bytes(plain) - before < held / 2)
    again = plain.run_prompt({"1": real, "2": generate("1", "Say hello.", max_tokens=4)}, timeout_s=120)

    assert held > 400_000_000
    assert again.outputs["2"]["text"] == first.outputs["2"]["text"]
    assert (seen.loads, again.cached) == (2, [])


def test_without_smart_memory_the_model_leaves_after_each_prompt_and_comes_back(comfy_with):
    server = comfy_with("--disable-smart-memory", "--cache-none", env=SCRIPTED)
    seen = start_empty(server)

    for number in range(1, 3):
        server.run_prompt({"1": load(), "2": generate("1"), "3": generate("1")})
        wait_until(lambda number=number: seen.unloads == number)
    server.stop()

    assert seen.loads == 2


def test_five_generators_queued_ten_times_load_once_and_memory_stays_flat(plain):
    seen = start_empty(plain)

    sizes = []
    for _ in range(10):
        run = plain.run_prompt({"1": load(), **{str(node): generate("1") for node in range(2, 7)}})
        assert len(run.ran()) >= 5
        sizes.append(rss_bytes(plain))

    assert (seen.loads, seen.unloads) == (1, 0)
    assert sizes[-1] - sizes[1] < 20_000_000


def test_two_equal_loaders_share_one_model_and_a_changed_option_says_why_it_reloads(plain):
    seen = start_empty(plain)

    plain.run_prompt({"1": load(), "2": load(), "3": generate("1"), "4": generate("2")})
    loads_before = seen.loads
    plain.run_prompt({"1": load(context_len=128), "2": generate("1")})

    assert loads_before == 1
    assert (seen.loads, seen.unloads) == (2, 1)
    assert seen.count("because its options changed: context_len: None -> 128") == 1


def test_release_waits_for_the_last_generator_of_the_prompt(plain):
    seen = start_empty(plain)
    loader = load(when_idle="release")

    plain.run_prompt({"1": loader, "2": generate("1"), "3": generate("1"), "4": generate("1")})

    assert (seen.loads, seen.unloads) == (1, 1)


def test_release_after_a_cached_generator_comes_with_the_next_prompt(plain):
    seen = start_empty(plain)
    loader, cached = load(when_idle="release"), generate("1")
    plain.run_prompt({"1": loader, "2": cached})

    plain.run_prompt({"1": loader, "2": cached, "3": generate("1")})
    unloads_between = seen.unloads
    plain.run_prompt({"1": loader, "2": cached, "3": generate("1", "next")})

    assert unloads_between == 1
    assert (seen.loads, seen.unloads) == (3, 2)


def test_free_runs_after_its_value_and_not_again_until_a_model_was_loaded(plain):
    seen = start_empty(plain)
    prompt = {"1": load(), "2": generate("1"), "3": free("2"), "4": free("3")}

    first = plain.run_prompt(prompt)
    again = plain.run_prompt(prompt)
    plain.run_prompt({"1": load(), "2": generate("1")})
    after_a_load = plain.run_prompt(prompt)

    assert first.outputs["3"]["text"] == ["1 unloaded, 1.0 kB freed"]
    assert first.outputs["4"]["text"] == ["nothing was loaded"]
    assert again.ran() == []
    assert "3" in after_a_load.ran()
    assert (seen.loads, seen.unloads) == (2, 2)


def test_out_of_memory_in_another_node_frees_the_model_and_the_next_prompt_works(comfy_with, tmp_path):
    pack = tmp_path / "out_of_memory"
    pack.mkdir()
    (pack / "__init__.py").write_text(
        "import torch\n"
        "class Full:\n"
        "    INPUT_TYPES = classmethod(lambda cls: {'required': {'text': ('STRING', {'forceInput': True})}})\n"
        "    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), 'run', True, 'test'\n"
        "    def run(self, text):\n"
        "        raise torch.cuda.OutOfMemoryError('the sampler ran out of memory')\n"
        "NODE_CLASS_MAPPINGS = {'TestFull': Full}\n"
    )
    from tools.comfyui import PACK_NAME, ROOT

    server = comfy_with(env=SCRIPTED, packs={PACK_NAME: ROOT, "out_of_memory": pack})
    seen = start_empty(server)

    failed = server.run_prompt(
        {"1": load(), "2": generate("1"), "3": {"class_type": "TestFull", "inputs": {"text": ["2", 0]}}}
    )
    unloads = seen.unloads
    after = server.run_prompt({"1": load(), "2": generate("1", "again")})

    assert "the sampler ran out of memory" in str(failed.error)
    assert unloads == 1
    assert after.outputs["2"]["text"] == ["You said: again"]
