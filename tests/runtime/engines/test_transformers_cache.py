import random
import weakref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import GREEDY, ModelSpec, Prompt
from runtime.engines import load
from runtime.engines.base import DecodeStep, FailedStep, PrefillStep, Work
from runtime.errors import GenerationFailed

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

KINDS = ("llama", "mistral", "qwen3_5")
WORDS = ("the sea ", "a fox ", "x", "light and shadow ")


def loaded(folder, **options):
    spec = ModelSpec(
        model=str(folder), engine="transformers", device="cpu", context_len=1024, options=tuple(options.items())
    )
    loading = load(spec)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="module", params=KINDS)
def engines(request, tiny):
    """Two engines of one model: the one under test, and one that never reuses anything."""
    folder = tiny(request.param)
    return loaded(folder, prefix_bytes=1 << 20), loaded(folder)


def run(engine, text, count=6):
    """(ids, prompt tokens, cached tokens)"""
    work = Work(encoded=engine.encode(Prompt.of(text)), sampling=GREEDY, max_tokens=count, seed=0)
    steps = [step for _, step in engine.generate([work])]
    prefills = [step for step in steps if isinstance(step, PrefillStep)]
    ids = [one for step in steps if isinstance(step, DecodeStep) for one in step.token_ids]
    return ids, prefills[-1].num_total, prefills[-1].num_cached


def cold(engine, text, count=6):
    engine.trim(0)
    return run(engine, text, count)[0]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map("".join), min_size=2, max_size=4))
def test_any_order_of_prompts_gives_what_cold_runs_give(engines, texts):
    warm, plain = engines

    for text in texts:
        assert run(warm, text)[0] == cold(plain, text)


def test_the_same_prompt_again_computes_one_token_of_it(engines):
    warm, plain = engines
    text = "once more, " * 6
    run(warm, text)

    ids, num_prompt, num_cached = run(warm, text)

    assert num_cached == num_prompt - 1
    assert ids == cold(plain, text)


def test_prompts_that_take_turns_are_all_remembered(engines):
    warm, plain = engines
    texts = [f"{word} " * 30 for word in ("alpha", "beta", "gamma")]
    for text in texts:
        run(warm, text)

    for text in texts:
        ids, num_prompt, num_cached = run(warm, text)
        assert num_cached == num_prompt - 1
        assert ids == cold(plain, text)
    assert warm.bytes.host_copy > 0


def test_a_shared_beginning_is_reused_once_it_has_been_shared(engines):
    warm, plain = engines
    warm.trim(0)
    shared = "a system prompt that all share, " * 5
    for ending in ("one", "two"):
        run(warm, shared + ending)

    ids, _, num_cached = run(warm, shared + "three")

    assert num_cached > len(shared)
    assert ids == cold(plain, shared + "three")


def test_what_is_kept_stays_within_its_budget(tiny):
    engine = loaded(tiny("llama"), prefix_bytes=200_000)

    for at in range(6):
        run(engine, f"{at} is a number. " * 20)

    assert 0 < engine.bytes.host_copy <= 200_000


def test_without_a_budget_nothing_is_kept(tiny):
    for kind in ("llama", "qwen3_5"):
        engine = loaded(tiny(kind), prefix_bytes=0)

        run(engine, "one " * 40)
        run(engine, "two " * 40)

        assert engine.bytes.host_copy == 0


def test_buffers_never_move(engines):
    warm, _ = engines
    run(warm, "first")
    layers = [layer for layer in warm._live.cache.layers if hasattr(layer, "capacity")]
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers]

    run(warm, "a longer one, " * 40, count=40)
    run(warm, "first")

    assert before == [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers]


def test_trim_frees_what_it_says_and_the_host_copies_too(engines):
    warm, _ = engines
    run(warm, "alpha " * 40)
    run(warm, "beta " * 40)
    held = warm.bytes

    freed = warm.trim(1)

    assert freed == held.kv_cache + held.host_copy > 0
    assert warm.bytes.kv_cache == warm.bytes.host_copy == 0


@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_answers_closed_at_random_moments_leave_no_trace(engines, place):
    warm, plain = engines
    wanted = cold(plain, "steady as she goes")
    chance = random.Random(place)

    for _ in range(7):
        text = "noise " * (150 if place == "prefill" else 10) + str(chance.random())
        work = Work(encoded=warm.encode(Prompt.of(text)), sampling=GREEDY, max_tokens=20, seed=0)
        steps = warm.generate([work])
        for _ in range(chance.randint(1, 2) if place == "prefill" else chance.randint(3, 15)):
            next(steps)
        steps.close()

        assert run(warm, "steady as she goes")[0] == wanted


def test_a_pass_that_fails_half_way_leaves_the_cache_whole(engines, monkeypatch):
    warm, plain = engines
    text = "half of this is torn, " * 8
    run(warm, text)
    layer = warm._model.model.layers[-1]

    def fail(*_args, **_options):
        raise RuntimeError("kernel broke")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        work = Work(encoded=warm.encode(Prompt.of(text + "more")), sampling=GREEDY, max_tokens=4, seed=0)
        [(_, step)] = warm.generate([work])
    assert "kernel broke" in str(step.error)

    assert run(warm, text + "more")[0] == cold(plain, text + "more")


def test_long_prompts_that_take_turns_need_room_for_one_of_them_only(tiny):
    plain = loaded(tiny("llama"))
    texts = [f"{word} " * 30 for word in ("alpha", "beta")]
    run(plain, texts[0])
    run(plain, texts[1])
    engine = loaded(tiny("llama"), prefix_bytes=plain.bytes.host_copy * 3 // 2)

    for text in texts * 3:
        assert run(engine, text)[0] == cold(plain, text)


def test_a_copy_back_that_fails_half_way_leaves_the_cache_whole(engines):
    warm, plain = engines
    texts = [f"{word} " * 30 for word in ("delta", "omega")]
    wanted = [cold(plain, text) for text in texts]
    for text in texts:
        run(warm, text)
    last = warm._live._kept._kept[-1].value.buffers
    last[-1] = (last[-1][0][..., :1, :].expand(3, -1, 7, -1), last[-1][1])

    work = Work(encoded=warm.encode(Prompt.of(texts[0])), sampling=GREEDY, max_tokens=4, seed=0)
    [(_, step)] = warm.generate([work])
    assert isinstance(step, FailedStep)
    warm._live.forget()

    assert [run(warm, text)[0] for text in reversed(texts)] == wanted[::-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_of_the_logits_that_fails_leaves_no_trace(tiny, monkeypatch, kind):
    engine = loaded(tiny(kind))
    wanted = run(engine, "after a probe")[0]
    ids = engine.encode(Prompt.of("something else " * 40)).token_ids
    last = engine._model.model.layers[-1]

    def fail(*_args, **_options):
        raise RuntimeError("kernel broke")

    with monkeypatch.context() as patch, pytest.raises(GenerationFailed):
        patch.setattr(last, "forward", fail)
        engine.logits(ids)

    assert run(engine, "after a probe")[0] == wanted


def test_an_item_that_failed_holds_no_tensor_while_the_next_one_runs(tiny, monkeypatch):
    engine, watched = loaded(tiny("llama")), []
    last = engine._model.model.layers[-1]

    def fail(states, *_args, **_options):
        activations = states + 1
        watched.append(weakref.ref(activations))
        raise RuntimeError("kernel broke")

    batch = [
        Work(encoded=engine.encode(Prompt.of(text)), sampling=GREEDY, max_tokens=2, seed=0) for text in ("one", "two")
    ]
    steps = engine.generate(batch)
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", fail)
        _, failed = next(steps)

    index, _ = next(steps)

    assert (index, isinstance(failed, FailedStep)) == (1, True)
    assert [one() for one in watched] == [None]
