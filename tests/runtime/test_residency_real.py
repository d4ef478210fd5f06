"""A real transformers engine on the CPU, tiny: cancelling at any moment and many runs leave everything as it was."""

import gc
import itertools
import os
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
psutil = pytest.importorskip("psutil")

from bench.synthetic_llm import TINY, write  # noqa: E402
from runtime import ModelSpec, Prompt, Request, Runtime, Sampling  # noqa: E402
from runtime.events import Finished, LoadProgress, PrefillProgress, TextDelta  # noqa: E402

NUM_INTERRUPTS = int(os.environ.get("RESIDENT_INTERRUPTS", "40"))
MOMENTS = (LoadProgress, PrefillProgress, TextDelta, TextDelta, PrefillProgress)
NUM_RUNS = 500
LONG = "lorem ipsum " * 100


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llm") / "tiny"
    write(folder, TINY, "cpu")
    return str(folder)


@pytest.fixture
def spec(tiny):
    return ModelSpec(model=tiny, engine="transformers", device="cpu", context_len=2048)


def ask(text, seed=7, max_tokens=6):
    return Request(prompt=Prompt.of(text), sampling=Sampling(temperature=1.0), max_tokens=max_tokens, seed=seed)


def answer(runtime, spec, text="the check"):
    [end] = [event for event in runtime.generate(spec, [ask(text)]) if isinstance(event, Finished)]
    return end.raw_text


def test_interrupts_at_random_moments_leave_the_next_run_as_if_they_had_not_been(spec):
    runtime = Runtime()
    draw = random.Random(20)
    expected = answer(runtime, spec)
    held = runtime.device_bytes(spec)

    for number in range(NUM_INTERRUPTS):
        kind = MOMENTS[number % len(MOMENTS)]
        if kind is LoadProgress:
            runtime.unload()
        nth = draw.randint(1, 25 if kind is LoadProgress else 2)
        events = runtime.generate(spec, [ask(f"{number} {LONG}", seed=number, max_tokens=20)])
        moments = (event for event in events if isinstance(event, kind))
        reached = list(itertools.islice(moments, nth))
        events.close()

        assert len(reached) == nth
        assert answer(runtime, spec) == expected
        assert runtime.device_bytes(spec) == held
        assert not runtime.residents()[0].is_busy


def test_an_interrupt_while_loading_frees_what_was_loaded(spec):
    runtime = Runtime()
    loading = runtime.leasing(spec)
    assert [type(one) for one in itertools.islice(loading, 8)] == [LoadProgress] * 8

    loading.close()

    assert runtime.residents() == []
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is torch.nn.Parameter]


def test_many_short_runs_leave_kv_bytes_and_the_process_as_they_were(spec):
    runtime = Runtime()
    process = psutil.Process()
    for number in range(50):
        answer(runtime, spec, f"warm {number}")
    held, resident = runtime.device_bytes(spec), process.memory_info().rss

    for number in range(NUM_RUNS):
        answer(runtime, spec, f"run {number}")

    assert runtime.device_bytes(spec) == held
    assert runtime.num_loads(spec) == 1
    assert process.memory_info().rss - resident < 30_000_000
