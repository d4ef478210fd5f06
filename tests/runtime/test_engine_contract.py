"""What every engine promises, run by every engine that can run here.

A case says how to make a small model for an engine, and how to compute the truth without that engine. What an
engine's capabilities exclude is skipped as not applicable, and never passes.
"""

import gc
import itertools
import random
import weakref
from dataclasses import dataclass, replace

import pytest

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime, Sampling, collect
from runtime.engines import ENGINES, footprint, load
from runtime.engines.base import DecodeStep, Drop, FailedStep, Feed, PrefillStep, Work
from runtime.errors import GenerationFailed
from tests.tiny import can_make, make_model

ROTARY_TABLES_BYTES = 64
"""What a tiny model computes for itself beside the weights of its files."""
CLOSE = 0.25
"""Difference of log-probability below which rounding to 16 bit may decide which of two ids is greater."""
SAMPLED = Sampling(temperature=1.5, top_p=0.95)


@dataclass
class Case:
    """An engine with a model.

    truth:   greedy ids after these ids, computed without the engine's loop and cache
    poison:  make the engine's logits NaN from the n-th forward pass on; returns how to undo it
    model:   the object whose death shows that the memory is free
    gap:     for a cache in 16 bit: log-probability between two ids after these ids
    """

    spec: ModelSpec
    truth: object = None
    poison: object = None
    model: object = None
    gap: object = None


def transformers_case(kind, folder):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if not can_make(kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")

    def truth(ids, count):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        ids = list(ids)
        with torch.inference_mode():
            for _ in range(count):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[-count:]

    def poison(engine, at):
        calls = itertools.count(1)

        def spoil(_module, _args, output):
            return output * float("nan") if next(calls) >= at else output

        return engine._model.get_output_embeddings().register_forward_hook(spoil).remove

    make_model(folder, kind)
    spec = ModelSpec(model=str(folder), engine="transformers", device="cpu", context_len=512)
    return Case(spec=spec, truth=truth, poison=poison, model=lambda engine: engine._model)


def scripted_case(_kind, _folder):
    return Case(spec=ModelSpec(model="script", engine="scripted", options=(("reply", "x" * 40),)))


def gap_by_llamacpp(engine, ids, one, other):
    """Log-probability between two ids after these ids, by the server behind an engine."""
    body = {"prompt": list(ids), "n_predict": 1, "n_probs": 20, "temperature": 0}
    [member] = getattr(engine, "_client", engine)._members
    reply = member.http.post("/completion", body, timeout_s=120).body
    found = {top["id"]: top["logprob"] for top in reply["completion_probabilities"][0]["top_logprobs"]}
    return abs(found[one] - found[other])


def llamacpp_case(gguf):
    options = (("threads", 1),)
    spec = ModelSpec(model=str(gguf), engine="llamacpp", device="cpu", context_len=512, options=options)
    return Case(spec=spec, gap=gap_by_llamacpp)


CASES = {
    ("transformers", "llama"): transformers_case,
    ("transformers", "qwen3"): transformers_case,
    ("transformers", "mistral"): transformers_case,
    ("transformers", "qwen3_5"): transformers_case,
    ("scripted", ""): scripted_case,
}
REAL = ("llamacpp", "smollm2")
WITHOUT = [(row.name, "") for row in ENGINES if row.name not in {name for name, _ in (*CASES, REAL)}]


@pytest.fixture(scope="module", params=[*CASES, REAL, *WITHOUT], ids=lambda one: "-".join(filter(None, one)))
def case(request, tmp_path_factory):
    name, kind = request.param
    [row] = [row for row in ENGINES if row.name == name]
    if reason := row.why_unavailable():
        pytest.skip(f"{name} cannot run here: {reason}")
    if request.param == REAL:
        return llamacpp_case(request.getfixturevalue("gguf_path"))
    if request.param not in CASES:
        pytest.skip(f"not applicable: there is no small model for {name} in these tests")
    return CASES[request.param](kind, tmp_path_factory.mktemp(f"{name}-{kind}"))


@pytest.fixture(scope="module")
def warm(case):
    """One engine for the tests that leave it as it was."""
    engine = loaded(case)
    yield engine
    engine.close()


def loaded(case):
    loading = load(case.spec)
    while True:
        try:
            next(loading)
        except StopIteration as end:
            return end.value


def needs(engine, capability):
    if not getattr(engine.info.capabilities, capability):
        pytest.skip(f"not applicable: {engine.info.engine} has not {capability}")


def work_of(engine, text, *, max_tokens=16, sampling=GREEDY, seed=0, is_stopping=False):
    encoded = engine.encode(Prompt.of(text))
    if not is_stopping:
        encoded = replace(encoded, stop=())
    return Work(encoded=encoded, sampling=sampling, max_tokens=max_tokens, seed=seed)


def ids_of(steps):
    return [one for step in steps if isinstance(step, DecodeStep) for one in step.token_ids]


def texts_of(steps):
    return [step.text for step in steps if isinstance(step, DecodeStep)]


def run(engine, *works):
    steps = [[] for _ in works]
    for index, step in engine.generate(works):
        steps[index].append(step)
    return steps


def answer(engine, text, **options):
    return ids_of(run(engine, work_of(engine, text, **options))[0])


def assert_same(case, engine, text, found, wanted):
    """Equal ids; in 16 bit they may part where the two ids are within CLOSE of each other."""
    at = next((at for at, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other), None)
    if at is None or case.gap is None:
        assert found == wanted
    else:
        ids = (*work_of(engine, text).encoded.token_ids, *wanted[:at])
        assert case.gap(engine, ids, found[at], wanted[at]) < CLOSE


def test_greedy_equals_a_forward_loop_without_cache(case, warm):
    if case.truth is None:
        pytest.skip("not applicable: no model behind it")
    work = work_of(warm, "a red kite over the sea", max_tokens=12)

    [steps] = run(warm, work)

    assert ids_of(steps) == case.truth(work.encoded.token_ids, 12)


def test_a_reused_prefix_gives_what_a_cold_run_gives(case, warm):
    needs(warm, "has_prefix_reuse")
    shared = "The same long beginning of every prompt, once and again. " * 3
    cold = []
    for ending in ("one", "two"):
        engine = loaded(case)
        cold.append(answer(engine, shared + ending))
        engine.close()

    answer(warm, shared + "one")
    second = run(warm, work_of(warm, shared + "two"))[0]
    again = run(warm, work_of(warm, shared + "two"))[0]
    back = answer(warm, shared + "one")

    for found in (ids_of(second), ids_of(again)):
        assert_same(case, warm, shared + "two", found, cold[1])
    assert_same(case, warm, shared + "one", back, cold[0])
    prefill = [step for step in again if isinstance(step, PrefillStep)][-1]
    assert prefill.num_cached > prefill.num_total // 2


def test_a_list_gives_what_its_items_give_alone(warm):
    texts = ("one", "two is longer", "three")

    together = run(warm, *(work_of(warm, text, sampling=SAMPLED, seed=at) for at, text in enumerate(texts)))

    alone = [answer(warm, text, sampling=SAMPLED, seed=at) for at, text in enumerate(texts)]
    assert [ids_of(steps) for steps in together] == alone


def test_a_length_is_exact(warm):
    for max_tokens in (1, 2, 7):
        [steps] = run(warm, work_of(warm, "count", max_tokens=max_tokens))

        assert sum(step.num_new_tokens for step in steps if isinstance(step, DecodeStep)) == max_tokens
        assert steps[-1].finish.as_dict() == {"reason": "length", "by": "max_tokens"}


def test_a_stop_id_ends_the_answer_and_its_text_is_left_out(warm):
    needs(warm, "has_token_ids")
    if warm.info.engine == "scripted":
        pytest.skip("not applicable: the script ends by its own stop id only")
    work = work_of(warm, "stop here", max_tokens=12)
    [whole] = run(warm, work)
    ids = ids_of(whole)
    stop = next(one for at, one in enumerate(ids) if at >= 3 and one not in ids[:at])
    entry = warm.encode(Prompt.of("x")).stop[0]

    [steps] = run(warm, replace(work, encoded=replace(work.encoded, stop=(replace(entry, id=stop),))))

    assert ids_of(steps) == ids[: ids.index(stop) + 1]
    assert (steps[-1].finish.by, steps[-1].finish.id) == ("token", stop)
    assert texts_of(steps)[:-1] == texts_of(whole)[: ids.index(stop)]
    assert steps[-1].text in ("", "\ufffd")


def test_a_stop_string_cuts_the_text(case, warm):
    runtime = Runtime(load=lambda spec: iter_engine(warm))
    requests = [Request(prompt=Prompt.of("say it"), sampling=GREEDY, max_tokens=24)]
    [whole] = collect(runtime.generate(case.spec, requests), case.spec, requests).results(warm.info, warm.bytes)
    assert len(whole.text) > 4
    stop = whole.text[3:5]
    prompt = replace(requests[0].prompt, stop_strings=(stop,))
    requests = [replace(requests[0], prompt=prompt)]

    [cut] = collect(runtime.generate(case.spec, requests), case.spec, requests).results(warm.info, warm.bytes)

    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.report["finish"]["by"] == "string"


def iter_engine(engine):
    yield from ()
    return engine


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_closed_answer_leaves_the_engine_as_if_it_had_never_been(warm, num_steps):
    wanted = answer(warm, "after the storm", sampling=SAMPLED, seed=3)
    steps = warm.generate([work_of(warm, "something else, " * 40), work_of(warm, "never reached")])
    list(itertools.islice(steps, num_steps))

    steps.close()

    assert answer(warm, "after the storm", sampling=SAMPLED, seed=3) == wanted


def test_equal_seeds_give_equal_answers_and_no_global_random_state_moves(warm):
    torch = pytest.importorskip("torch")
    before = torch.get_rng_state(), random.getstate()

    first, again, other = (answer(warm, "dice", sampling=SAMPLED, seed=seed) for seed in (5, 5, 6))

    assert first == again
    assert warm.info.engine == "scripted" or first != other
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_fed_ids_come_back_as_if_they_had_been_drawn(warm):
    needs(warm, "can_feed")
    fed = warm.encode(Prompt.of("abc")).token_ids[-3:]
    steps = warm.generate([work_of(warm, "feed me", max_tokens=8)])
    first = next(step for _, step in steps if isinstance(step, DecodeStep))

    later = [steps.send(Feed(token_ids=fed))[1], *(step for _, step in steps)]

    assert tuple(ids_of(later)[:3]) == fed
    assert len(ids_of([first, *later])) == 8


def test_a_dropped_request_says_no_more_and_the_next_goes_on(warm):
    needs(warm, "can_feed")
    steps = warm.generate([work_of(warm, "drop me"), work_of(warm, "keep me", max_tokens=4)])
    for index, step in steps:
        if index == 0 and isinstance(step, DecodeStep):
            break

    later = [steps.send(Drop()), *steps]

    assert {index for index, _ in later} == {1}
    assert ids_of(step for _, step in later) == answer(warm, "keep me", max_tokens=4)


def test_the_cache_has_the_bytes_that_were_computed(case, warm):
    computed, measured = footprint(case.spec), warm.bytes

    assert measured.kv_cache == computed.kv_cache
    assert 0 <= measured.weights - computed.weights <= ROTARY_TABLES_BYTES


def test_a_token_changes_no_logits_before_it(warm):
    needs(warm, "has_logits")
    ids = list(warm.encode(Prompt.of("the quick brown fox jumps over the lazy dog")).token_ids)
    for at in (1, len(ids) // 2, len(ids) - 1):
        changed = [*ids[:at], (ids[at] + 1) % 200, *ids[at + 1 :]]

        before, after = warm.logits(ids), warm.logits(changed)

        assert before[:at].equal(after[:at])
        assert not before[at:].equal(after[at:])


def test_logits_that_are_not_finite_fail_the_request_by_name(case, warm):
    needs(warm, "has_logits")
    undo = case.poison(warm, 4)
    try:
        [steps, others] = run(warm, work_of(warm, "poison"), work_of(warm, "also"))
    finally:
        undo()

    assert isinstance(steps[-1], FailedStep)
    assert isinstance(steps[-1].error, GenerationFailed)
    message = str(steps[-1].error)
    num_prefills = sum(isinstance(step, PrefillStep) for step in steps)
    assert f"Step {4 - num_prefills + 1} " in message
    assert warm.info.engine in message
    assert warm.info.attention in message
    assert isinstance(others[-1], FailedStep)
    assert len(answer(warm, "well again")) == 16


def test_close_frees_everything_and_may_be_called_again(case):
    engine = loaded(case)
    answer(engine, "goodbye")
    alive = weakref.ref(case.model(engine)) if case.model else None

    engine.close()
    engine.close()

    gc.collect()
    assert engine.bytes.device == engine.bytes.host_copy == 0
    assert alive is None or alive() is None


def test_trim_gives_back_the_idle_cache_and_the_next_answer_is_the_same(warm):
    if warm.info.engine == "llamacpp":
        pytest.skip("not applicable: llama.cpp's cache is one block for the life of the model")
    wanted = answer(warm, "trim me, " * 20)
    held = warm.bytes.device

    freed = warm.trim(1)

    assert freed >= held - warm.bytes.device
    assert warm.bytes.kv_cache == 0
    assert answer(warm, "trim me, " * 20) == wanted


OF_A_SERVER = {
    one.__name__: one
    for one in (
        test_a_list_gives_what_its_items_give_alone,
        test_a_length_is_exact,
        test_a_stop_id_ends_the_answer_and_its_text_is_left_out,
        test_a_stop_string_cuts_the_text,
        test_a_closed_answer_leaves_the_engine_as_if_it_had_never_been,
        test_equal_seeds_give_equal_answers_and_no_global_random_state_moves,
        test_close_frees_everything_and_may_be_called_again,
    )
}
"""What a server that others own can be held to: it is never cold, and its memory and its logits are its own."""
