"""The transformers engine on a real GPU: memory comes back, addresses stay, reuse is quick, attention is proven."""

import gc
import itertools
import statistics
import time

import pytest

from runtime import GREEDY, ModelSpec, Prompt
from runtime.engines import footprint, load
from runtime.engines.base import DecodeStep, Encoded, PrefillStep, Work
from tests.tiny import COMMON, KINDS, make_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIDDLE = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40960,
}


def loaded(folder, **fields):
    spec = ModelSpec(model=str(folder), engine="transformers", device="cuda", **fields)
    loading = load(spec)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return end.value, spec


def work_of(engine, ids, count):
    encoded = Encoded(prompt=Prompt.of("x"), token_ids=tuple(ids), text="")
    return Work(encoded=encoded, sampling=GREEDY, max_tokens=count, seed=0)


def run(engine, ids, count=16):
    steps = [step for _, step in engine.generate([work_of(engine, ids, count)])]
    return [one for step in steps if isinstance(step, DecodeStep) for one in step.token_ids], steps


def ids_of_length(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def middle(tmp_path_factory):
    """A Llama of 300 million random weights."""
    KINDS["middle"] = ("LlamaConfig", "LlamaForCausalLM", {**COMMON, **MIDDLE})
    yield make_model(tmp_path_factory.mktemp("middle"), "middle")
    del KINDS["middle"]


def allocated():
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def test_closing_and_half_loading_give_all_memory_back(middle):
    warm, _ = loaded(middle)
    warm.close()
    before = allocated()

    engine, spec = loaded(middle, context_len=4096)
    held = torch.cuda.memory_allocated() - before
    computed = footprint(spec)
    assert abs(held - computed.device) < 0.02 * computed.device + (16 << 20)
    assert engine.bytes.kv_cache == computed.kv_cache
    engine.close()
    assert allocated() - before < 1 << 20

    loading = load(spec)
    for _ in range(40):
        next(loading)
    loading.close()
    assert allocated() - before < 1 << 20


def test_decoding_makes_no_new_segment_no_retry_and_moves_no_buffer(middle):
    engine, _ = loaded(middle, context_len=4096)
    layers = engine._live.cache.layers
    run(engine, ids_of_length(600), 8)
    steps = engine.generate([work_of(engine, ids_of_length(600, seed=1), 200)])
    while not isinstance(next(steps)[1], DecodeStep):
        pass
    addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers]
    before = torch.cuda.memory_stats()

    for _ in steps:
        pass

    after = torch.cuda.memory_stats()
    for name in ("segment.all.allocated", "num_alloc_retries"):
        assert after[name] == before[name], name
    assert addresses == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers]
    engine.close()


@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_a_warm_prefix_answers_within_two_decode_steps_and_20_ms(middle, length, capsys):
    engine, _ = loaded(middle, context_len=length + 256)
    run(engine, ids_of_length(300, seed=9), 8)
    ids = ids_of_length(length)

    def ttft():
        began, arrivals = time.perf_counter(), []
        for _, step in engine.generate([work_of(engine, ids, 17)]):
            if isinstance(step, DecodeStep):
                arrivals.append(time.perf_counter())
        return arrivals[0] - began, statistics.median(b - a for a, b in itertools.pairwise(arrivals))

    (cold_s, _), (warm_s, step_s) = ttft(), min(ttft() for _ in range(3))

    with capsys.disabled():
        print(f"\nprefix of {length}: TTFT cold {cold_s:.4f} s, warm {warm_s:.4f} s, decode step {step_s:.4f} s")
    assert warm_s <= 2 * step_s + 0.02
    engine.close()


def test_a_kept_prefix_comes_back_from_host_memory_and_gives_the_same(middle):
    engine, _ = loaded(middle, dtype="fp32", context_len=4096)
    first, second = ids_of_length(1000, seed=1), ids_of_length(1000, seed=2)
    wanted = run(engine, first)[0]
    run(engine, second)

    ids, steps = run(engine, first)

    assert [step for step in steps if isinstance(step, PrefillStep)][-1].num_cached == len(first) - 1
    assert ids == wanted
    engine.trim(1)
    assert engine.bytes.kv_cache == 0
    ids, steps = run(engine, first)
    assert [step for step in steps if isinstance(step, PrefillStep)][-1].num_cached == len(first) - 1
    assert ids == wanted
    engine.close()


def test_parked_weights_leave_the_device_and_come_back_the_same(middle):
    before = allocated()
    engine, _ = loaded(middle, context_len=1024)
    wanted = run(engine, ids_of_length(100))[0]

    assert engine.park(1 << 34)

    assert engine.bytes.device == 0
    assert allocated() - before < 2 << 20
    for _ in engine.unpark():
        pass
    assert engine.is_in_place
    assert run(engine, ids_of_length(100))[0] == wanted
    engine.close()
    assert allocated() - before < 2 << 20


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_5"])
def test_greedy_in_fp32_equals_generate_or_parts_at_a_near_tie(tiny, kind):
    folder, ids = tiny(kind), ids_of_length(120)
    engine, _ = loaded(folder, dtype="fp32")

    got = run(engine, ids, 32)[0]

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda")
    prompt = torch.tensor([ids], device="cuda")
    mask = torch.ones_like(prompt)
    wanted = model.generate(prompt, attention_mask=mask, max_new_tokens=32, do_sample=False, eos_token_id=None)
    wanted = wanted[0, len(ids) :].tolist()
    if got != wanted:
        at = next(at for at, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1])
        with torch.inference_mode():
            top = model(torch.tensor([ids + wanted[:at]], device="cuda")).logits[0, -1].topk(2).values
        assert top[0] - top[1] < 1e-3
    engine.close()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_attention_that_runs_is_reported_and_causal(middle, attention):
    engine, _ = loaded(middle, attention=attention, context_len=1024)
    if attention == "flash_attention_2" and engine.info.attention != attention:
        assert any("flash_attention_2 is not used" in one for one in engine.info.warnings)
        pytest.skip(engine.info.warnings[0])
    assert engine.info.attention == attention
    ids = ids_of_length(700)
    changed = [*ids[:650], (ids[650] + 1) % 250, *ids[651:]]

    before, after = engine.logits(ids), engine.logits(changed)

    assert before[:650].equal(after[:650])
    assert not before[650:].equal(after[650:])
    engine.close()
