"""The ExLlamaV2 adapter against a scripted SDK, and against the real SDK's Python where that lies unpacked."""

import json
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime, Sampling, collect
from runtime.engines import exllamav2, exllamav2_attention, exllamav2_load, exllamav2_sdk
from runtime.engines.base import DecodeStep, Drop, FailedStep, Feed, PrefillStep, Work
from runtime.engines.exllamav2_jobs import settings_for
from runtime.errors import (
    EngineUnavailable,
    GenerationFailed,
    ModelLoadFailed,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
)
from runtime.events import LoadProgress, PrefillProgress
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.models.awq_writer import TINY_QWEN2, tiny_qwen2_weights, write_folder

SDKS = {"scripted": cpu.scripted_sdk, "real": cpu.real_sdk}


@pytest.fixture(params=list(SDKS))
def sdk(request):
    if request.param == "real" and (reason := cpu.real_folder()[1]):
        pytest.skip(reason)
    return SDKS[request.param]()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A 16-bit folder: the adapter reads its config and headers; the model of exllamav2_cpu does the rest."""
    folder = write_folder(tmp_path_factory.mktemp("exl2") / "model", TINY_QWEN2, tiny_qwen2_weights())
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def open_engine(folder, sdk, monkeypatch):
    """Load an engine on the CPU; keywords are the spec's, `stop_ids` the prompter's."""
    opened = []
    monkeypatch.setattr(exllamav2_load.gc, "collect", lambda: 0)

    def open_it(*, stop_ids=(), model=None, context_len=1024, **fields):
        monkeypatch.setattr(exllamav2, "resolve_device", lambda _: "cpu")
        monkeypatch.setattr(exllamav2, "open_sdk", lambda: sdk)
        monkeypatch.setattr(exllamav2, "Prompter", SimpleNamespace(load=lambda _: cpu.Prompter(stop_ids)))
        spec = ModelSpec(model=str(model or folder), engine="exllamav2", context_len=context_len, **fields)
        loading, progress = exllamav2.load(spec), []
        try:
            while True:
                progress.append(next(loading))
        except StopIteration as end:
            engine = end.value
        engine.progress = progress
        opened.append(engine)
        return engine

    yield open_it
    for engine in opened:
        engine.close()


def work(engine, ids, max_tokens=16, *, sampling=GREEDY, seed=0):
    encoded = engine.encode(Prompt.of(" ".join(map(str, ids))))
    return Work(encoded=encoded, sampling=sampling, max_tokens=max_tokens, seed=seed)


def run(engine, *batch, commands=None):
    """Everything that the engine yields, by request. commands: (index, number of the decode step) -> command."""
    steps = engine.generate(batch)
    out = {index: [] for index in range(len(batch))}
    command = None
    while True:
        try:
            index, step = steps.send(command)
        except StopIteration:
            return out
        out[index].append(step)
        num_decoded = sum(isinstance(one, DecodeStep) for one in out[index])
        is_new = isinstance(step, DecodeStep)
        command = (commands or {}).get((index, num_decoded)) if is_new else None


def ids_of(steps):
    return [one for step in steps if isinstance(step, DecodeStep) for one in step.token_ids]


def text_of(steps):
    return "".join(step.text for step in steps if isinstance(step, DecodeStep))


def free_pages(engine):
    generator = engine._generator
    if hasattr(generator, "num_free_pages"):
        return generator.num_free_pages
    return len(generator.unreferenced_pages)


PROMPT = [5, 17, 42, 7, 99]
LONG = [(place * 13) % 150 for place in range(700)]


def test_greedy_is_the_manual_loop(open_engine):
    engine = open_engine()

    [steps] = run(engine, work(engine, PROMPT)).values()

    assert ids_of(steps) == cpu.manual(PROMPT, 16)
    assert text_of(steps) == cpu.Detokenizer().push(cpu.manual(PROMPT, 16))
    assert (steps[-1].finish.reason, steps[-1].finish.by) == ("length", "max_tokens")
    assert steps[0] == PrefillStep(num_done=5, num_total=5, num_cached=0)


def test_loading_shows_progress_and_the_report_says_what_runs(open_engine):
    engine = open_engine()

    assert engine.progress[-1] == LoadProgress(done=2, total=2, unit="layers")
    assert (engine.info.attention, engine.info.kv_cache, engine.info.context_len) == ("flash_attention_2", "fp16", 1024)


def test_a_list_gives_what_single_requests_give(open_engine):
    engine = open_engine(context_len=4096)
    prompts = [PROMPT, LONG[:300], [9], LONG[3:40], [1, 2, 3]]

    together = run(engine, *(work(engine, ids, 20 + at) for at, ids in enumerate(prompts)))

    for at, ids in enumerate(prompts):
        assert ids_of(together[at]) == cpu.manual(ids, 20 + at)
    assert engine._generator.num_remaining_jobs() == 0


def test_a_stop_id_ends_the_text_and_is_not_in_it(open_engine):
    expected = cpu.manual(PROMPT, 16)
    engine = open_engine(stop_ids=(expected[7],))
    at = expected.index(expected[7])

    [steps] = run(engine, work(engine, PROMPT)).values()

    assert ids_of(steps) == expected[: at + 1]
    assert text_of(steps) == cpu.Detokenizer().push(expected[:at])
    assert steps[-1].finish.as_dict() == {
        "reason": "stop",
        "by": "token",
        "id": expected[at],
        "text": f"<{expected[at]}>",
    }


def test_ids_that_the_sdk_withheld_until_the_stop_id_are_not_lost(open_engine, monkeypatch):
    expected = cpu.manual(PROMPT, 16)
    engine = open_engine(stop_ids=(expected[7],))
    monkeypatch.setattr(cpu.Job, "hold", staticmethod(lambda new: new > 3))
    at = expected.index(expected[7])

    [steps] = run(engine, work(engine, PROMPT)).values()

    assert ids_of(steps) == expected[: at + 1]


def test_without_a_stop_id_nothing_stops_before_the_limit(open_engine):
    engine = open_engine()

    [steps] = run(engine, work(engine, PROMPT, 300)).values()

    assert ids_of(steps) == cpu.manual(PROMPT, 300)


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
@pytest.mark.parametrize("max_tokens", [1, 2, 9, 40])
def test_drafting_changes_neither_text_nor_length(open_engine, num_draft_tokens, max_tokens):
    engine = open_engine(options=(("draft", "ngram"), ("num_draft_tokens", num_draft_tokens)))
    prompt = [3, 4] * 20

    [steps] = run(engine, work(engine, prompt, max_tokens)).values()

    assert ids_of(steps) == cpu.manual(prompt, max_tokens)
    draft = steps[-1].details["draft"]
    assert draft["kind"] == "ngram"
    assert 0 <= draft["num_accepted_tokens"] <= draft["num_drafted_tokens"]


def test_a_drafted_request_may_fill_the_context_to_its_last_token(open_engine):
    engine = open_engine(context_len=512, options=(("draft", "ngram"),))

    [steps] = run(engine, work(engine, LONG[:400], 112)).values()

    assert ids_of(steps) == cpu.manual(LONG[:400], 112)
    assert steps[-1].finish.by == "context"


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_closing_frees_every_page_and_the_next_text_is_as_if_it_had_never_been(open_engine, num_steps):
    engine = open_engine(context_len=2048)
    steps = engine.generate([work(engine, LONG, 100), work(engine, PROMPT, 100)])
    for _ in range(num_steps):
        next(steps)

    steps.close()

    assert engine._generator.num_remaining_jobs() == 0
    assert free_pages(engine) == engine._generator.max_pages
    [after] = run(engine, work(engine, LONG, 30)).values()
    assert ids_of(after) == cpu.manual(LONG, 30)


def test_a_dropped_request_goes_and_the_others_stay(open_engine):
    engine = open_engine()

    out = run(engine, work(engine, PROMPT, 30), work(engine, [8, 9], 30), commands={(0, 3): Drop()})

    assert len(ids_of(out[0])) == 3
    assert ids_of(out[1]) == cpu.manual([8, 9], 30)
    assert free_pages(engine) == engine._generator.max_pages


@pytest.mark.parametrize("draft", [(), (("draft", "ngram"),)])
def test_fed_ids_come_back_and_the_model_goes_on_from_them(open_engine, draft):
    engine = open_engine(options=draft)
    fed = (120, 121, 122)

    out = run(engine, work(engine, LONG[:500], 20), work(engine, PROMPT, 20), commands={(0, 4): Feed(token_ids=fed)})

    at = sum(len(step.token_ids) for step in [s for s in out[0] if isinstance(s, DecodeStep)][:4])
    assert ids_of(out[0]) == cpu.manual(LONG[:500], 20, forced={at + i: one for i, one in enumerate(fed)})
    assert text_of(out[0]) == cpu.Detokenizer().push(ids_of(out[0]))
    assert ids_of(out[1]) == cpu.manual(PROMPT, 20)


def test_feeding_computes_only_what_is_new(open_engine):
    engine = open_engine()
    model = engine._parts.model
    seen = []
    original = model.forward_chunk
    model.forward_chunk = lambda **call: (seen.append(call["input_ids"].shape[1]), original(**call))[1]

    run(engine, work(engine, LONG[:520], 8), commands={(0, 3): Feed(token_ids=(1, 2))})

    assert sum(seen) < 2 * 520 - 256


def test_fed_ids_that_fill_the_limit_end_the_request_exactly(open_engine):
    engine = open_engine()

    [steps] = run(engine, work(engine, PROMPT, 6), commands={(0, 4): Feed(token_ids=(1, 2, 3, 4))}).values()

    assert ids_of(steps) == [*cpu.manual(PROMPT, 4), 1, 2]
    assert steps[-1].finish.reason == "length"
    assert engine._generator.num_remaining_jobs() == 0


def test_the_random_numbers_go_on_after_a_feed(open_engine):
    engine = open_engine()
    drawn = Sampling(temperature=3.0)
    [plain] = run(engine, work(engine, PROMPT, 12, sampling=drawn, seed=5)).values()
    again = ids_of(plain)[4:6]

    [fed] = run(
        engine, work(engine, PROMPT, 12, sampling=drawn, seed=5), commands={(0, 4): Feed(token_ids=tuple(again))}
    ).values()

    numbers = random.Random(5)
    draws = [numbers.random() for _ in range(12)]
    assert ids_of(fed)[:6] == ids_of(plain)[:6]
    ids = [*PROMPT, *ids_of(fed)[:6]]
    expected = cpu.draw(cpu.next_logits(ids), SimpleNamespace(temperature=3.0, top_k=0, top_p=1, min_p=0), draws[4])
    assert ids_of(fed)[6] == expected


def test_logits_that_are_not_finite_fail_their_request_alone_and_say_where(open_engine):
    engine = open_engine()
    engine._parts.model.nan_after = [8, 9, *cpu.manual([8, 9], 3)]

    out = run(engine, work(engine, PROMPT), work(engine, [8, 9]), work(engine, [77]))

    assert ids_of(out[0]) == cpu.manual(PROMPT, 16)
    assert ids_of(out[2]) == cpu.manual([77], 16)
    assert ids_of(out[1]) == cpu.manual([8, 9], 3)
    assert isinstance(out[1][-1], FailedStep)
    sentence = str(out[1][-1].error)
    assert sentence.startswith("ExLlamaV2 with flash_attention_2: non-finite logits at output token 4.")
    assert free_pages(engine) == engine._generator.max_pages


def test_pages_with_spoilt_values_are_not_used_again(open_engine):
    engine = open_engine()
    engine._parts.model.nan_after = LONG[:600]
    run(engine, work(engine, LONG[:600]))
    engine._parts.model.nan_after = None

    [steps] = run(engine, work(engine, LONG[:600])).values()

    assert steps[-1].details["num_cached_tokens"] == 0


def test_a_forward_pass_that_fails_costs_only_the_request_that_fails_alone(open_engine):
    engine = open_engine()
    engine._parts.model.poison = 150

    out = run(engine, work(engine, PROMPT), work(engine, [8, 150, 9]), work(engine, [77]))

    assert ids_of(out[0]) == cpu.manual(PROMPT, 16)
    assert ids_of(out[2]) == cpu.manual([77], 16)
    assert [type(step) for step in out[1]] == [FailedStep]
    assert isinstance(out[1][0].error, GenerationFailed)
    assert "illegal memory access" in str(out[1][0].error)
    assert free_pages(engine) == engine._generator.max_pages


def test_a_prefix_is_reused_across_runs_and_reported(open_engine):
    engine = open_engine()
    [cold] = run(engine, work(engine, LONG)).values()

    [warm] = run(engine, work(engine, [*LONG[:600], 3, 4])).values()

    assert cold[-1].details["num_cached_tokens"] == 0
    assert 512 <= warm[-1].details["num_cached_tokens"] <= 600
    assert ids_of(warm) == cpu.manual([*LONG[:600], 3, 4], 16)


def test_other_loras_forget_the_cached_prefix(open_engine, tmp_path):
    engine = open_engine()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    run(engine, work(engine, LONG))

    engine.set_loras([(str(tmp_path), 2)])
    [with_lora] = run(engine, work(engine, LONG)).values()
    engine.set_loras([(str(tmp_path), 2)])
    [again] = run(engine, work(engine, LONG)).values()
    engine.set_loras([])
    [without] = run(engine, work(engine, LONG)).values()

    assert [steps[-1].details["num_cached_tokens"] >= 512 for steps in (with_lora, again, without)] == [
        False,
        True,
        False,
    ]
    assert ids_of(with_lora) == cpu.manual(LONG, 16, strength=2)
    assert ids_of(without) == cpu.manual(LONG, 16)


def test_loras_of_a_spec_are_read_line_by_line():
    spec = ModelSpec(model="m", options=(("loras", "/a b\n/c@d\n/e @ 0.5\n"),))

    assert exllamav2.read_loras(spec) == [("/a b", 1.0), ("/c@d", 1.0), ("/e", 0.5)]


def test_a_folder_that_is_no_lora_is_named(open_engine, tmp_path):
    with pytest.raises(ModelNotFound, match=r"adapter_config\.json"):
        open_engine(options=(("loras", str(tmp_path)),))


def test_trimming_gives_the_kv_cache_back_and_the_next_request_gets_it_again(open_engine):
    engine = open_engine()
    run(engine, work(engine, LONG))
    before = engine.bytes

    freed = engine.trim(1)

    assert freed == before.kv_cache > 0
    assert engine.bytes.kv_cache == 0
    assert engine.trim(1) == 0
    [steps] = run(engine, work(engine, LONG)).values()
    assert ids_of(steps) == cpu.manual(LONG, 16)
    assert steps[-1].details["num_cached_tokens"] == 0
    assert engine.bytes == before


def test_a_kv_cache_that_finds_no_room_holds_nothing_and_comes_back_whole_later(open_engine, monkeypatch):
    engine = open_engine()
    engine.trim(1)
    cache = engine._parts.cache

    def half():
        cache.key_states[0] = torch.zeros(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(OutOfMemory, match="Allocating the KV cache"):
        patch.setattr(cache, "update_cache_tensors", half)
        run(engine, work(engine, PROMPT))
    left = [one for one in [*cache.key_states, *cache.value_states] if one is not None]
    [steps] = run(engine, work(engine, PROMPT)).values()

    assert left == []
    assert ids_of(steps) == cpu.manual(PROMPT, 16)


@pytest.mark.parametrize("kv_cache", ["fp16", "q8", "q6", "q4"])
def test_kv_bytes_computed_are_kv_bytes_measured(open_engine, folder, kv_cache):
    expected = exllamav2.footprint(ModelSpec(model=str(folder), context_len=1000, kv_cache=kv_cache)).kv_cache

    engine = open_engine(context_len=1000, kv_cache=kv_cache)

    assert engine.bytes.kv_cache == expected == engine.info.details["kv_bytes_computed"]


def test_closing_twice_is_closing_once(open_engine):
    engine = open_engine()

    engine.close()
    engine.close()

    assert engine.bytes.device == 0
    assert engine._parts.model is None


def test_the_neutral_settings_are_neutral_and_greedy_draws_nothing(sdk):
    neutral, greedy = settings_for(sdk, Sampling()), settings_for(sdk, GREEDY)

    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (1.0, 0, 1.0, 0.0)
    assert neutral.token_repetition_penalty == greedy.token_repetition_penalty == 1.0
    assert greedy.top_k == 1


def test_a_seed_is_private(open_engine):
    engine = open_engine()
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    [first] = run(engine, work(engine, PROMPT, sampling=Sampling(), seed=7)).values()
    [second] = run(engine, work(engine, PROMPT, sampling=Sampling(), seed=7)).values()
    [other] = run(engine, work(engine, PROMPT, sampling=Sampling(), seed=8)).values()

    assert ids_of(first) == ids_of(second) != ids_of(other)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()


def test_through_the_runtime_a_stop_string_ends_the_request_at_once(open_engine):
    engine = open_engine()
    expected = cpu.manual(PROMPT, 40)
    stop = cpu.Detokenizer().push(expected[9:11])
    prompt = Prompt(messages=Prompt.of(" ".join(map(str, PROMPT))).messages, stop_strings=(stop,))
    request = Request(prompt=prompt, sampling=GREEDY, max_tokens=40)

    def load(spec):
        yield from ()
        return engine

    runtime, spec = Runtime(load=load), ModelSpec(model="m")
    events = list(runtime.generate(spec, [request]))
    [result] = collect(events, spec, [request]).results(engine.info, engine.bytes)

    assert result.text == cpu.Detokenizer().push(expected[:9])
    assert result.report["num_output_tokens"] == 11
    assert any(isinstance(event, PrefillProgress) for event in events)
    assert engine._generator.num_remaining_jobs() == 0


def test_without_flash_attn_one_request_runs_at_a_time_and_the_report_says_why(open_engine):
    engine = open_engine(attention="eager")

    out = run(engine, work(engine, PROMPT), work(engine, LONG))

    assert (engine.info.attention, engine.info.details["is_paged"]) == ("eager", False)
    assert engine.info.details["why_not_flash_attention"] == "it was asked not to"
    assert engine._parts.config.no_sdpa
    assert ids_of(out[0]) == cpu.manual(PROMPT, 16)
    assert ids_of(out[1]) == cpu.manual(LONG, 16)
    [warm] = run(engine, work(engine, [*LONG[:300], 5])).values()
    assert warm[-1].details["num_cached_tokens"] >= 256
    assert ids_of(warm) == cpu.manual([*LONG[:300], 5], 16)


def test_attention_that_sees_the_future_is_refused_before_any_text(open_engine, monkeypatch):
    original = cpu.Model.__init__

    def blind(self, config):
        original(self, config)
        self.is_causal = False

    monkeypatch.setattr(cpu.Model, "__init__", blind)

    with pytest.raises(GenerationFailed, match="not causal: changing token 40 moved the logits before it"):
        open_engine()


def test_a_draft_model_of_another_tokenizer_is_refused(open_engine, folder, tmp_path):
    write_folder(tmp_path / "draft", TINY_QWEN2, tiny_qwen2_weights())
    tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps({**tokens, "model": {"vocab": {"b": 0}}}))

    with pytest.raises(ModelUnsupported, match="another tokenizer"):
        open_engine(options=(("draft", str(tmp_path / "draft")),))


def test_an_awq_folder_is_repacked_on_the_way(open_engine, tmp_path, monkeypatch):
    monkeypatch.setenv("RESIDENT_LLM_CACHE", str(tmp_path / "cache"))
    source = write_folder(tmp_path / "awq", TINY_QWEN2, tiny_qwen2_weights())

    engine = open_engine(model=source)

    assert engine.info.details["is_repacked"]
    assert {event.what for event in engine.progress} == {"repacking AWQ", "weights"}
    assert engine._parts.config.model_dir.startswith(str(tmp_path / "cache"))
    assert engine._parts.config.rotary_embedding_base == 1e6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "cannot run Qwen3_5ForConditionalGeneration"),
        ({"architectures": ["A", "B"]}, "cannot run A, B"),
        ({"quantization_config": {"quant_method": "fp8"}}, "cannot read fp8 weights"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "has 8 bits"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}},
            "gptq_v2 format",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}, "architectures": ["Phi3ForCausalLM"]},
            "fused projections",
        ),
        ({"rope_parameters": None}, "rope_theta"),
    ],
)
def test_what_it_cannot_run_is_refused_before_loading_with_a_way_out(tmp_path, change, words):
    folder = write_folder(tmp_path, TINY_QWEN2, tiny_qwen2_weights())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None, **change}))

    with pytest.raises(ModelUnsupported) as caught:
        exllamav2_load.plan(ModelSpec(model=str(folder)))

    assert words in str(caught.value)
    assert any(way in str(caught.value) for way in ("transformers engine", "config.json"))


def test_a_quantised_cache_of_odd_heads_is_refused(tmp_path):
    folder = write_folder(tmp_path, {**TINY_QWEN2, "head_dim": 40}, tiny_qwen2_weights())

    with pytest.raises(ModelUnsupported, match="Heads of 40 cannot be cached in q8"):
        exllamav2_load.plan(ModelSpec(model=str(folder), kv_cache="q8"))


def test_what_does_not_fit_is_told_with_all_numbers_and_the_length_that_would(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    planned = exllamav2_load.plan(ModelSpec(model=str(folder), context_len=8192))
    free = planned.weights_bytes + planned.kv_bytes // 2 + 10
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))

    with pytest.raises(
        OutOfMemory, match=r"fp16 KV cache of 4\.2 MB for 8192 tokens .* Set context_len to 4096 or less"
    ):
        exllamav2_load.check_room(planned, "cuda:0")


def test_flash_attention_is_believed_only_after_its_numbers():
    probe = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": "cpu"}

    def blind(**call):
        return cpu.paged_attention(**call, is_causal=False)

    def dead(**_):
        raise RuntimeError("no kernel image is available")

    assert exllamav2_attention.probe_flash(cpu.paged_attention, **probe) is None
    assert "off exact attention" in exllamav2_attention.probe_flash(blind, **probe)
    assert "no kernel image" in exllamav2_attention.probe_flash(dead, **probe)


def test_flash_attention_that_was_asked_for_and_is_broken_is_an_error():
    sdk = SimpleNamespace(flash_fault="flash-attn is broken (ImportError: undefined symbol)")

    with pytest.raises(EngineUnavailable, match="undefined symbol"):
        exllamav2_attention.choose(sdk, "flash_attention_2", num_heads=4, num_kv_heads=2, head_dim=64, device="cpu")


def test_a_model_that_the_sdk_cannot_read_is_a_load_fault_with_its_words(open_engine, monkeypatch):
    def fail(self, folder):
        raise ValueError(" ## Could not find model.layers.0.mlp.up_proj.* in model")

    monkeypatch.setattr(cpu.Config, "__init__", fail)

    with pytest.raises(ModelLoadFailed, match=r"Could not find model\.layers\.0\.mlp\.up_proj"):
        open_engine()


def test_loading_leaves_gradient_mode_and_the_host_alone_at_every_step(open_engine, sdk, folder, monkeypatch):
    def load(self, cache, callback_gen):
        with torch.inference_mode():
            for layer in range(cpu.LAYERS):
                self.cache_map[layer] = "cpu"
                yield from callback_gen(layer, cpu.LAYERS)
            cache.update_cache_tensors()

    monkeypatch.setattr(cpu.Model, "load_autosplit_gen", load)
    spec = ModelSpec(model=str(folder), context_len=512)

    modes = [torch.is_inference_mode_enabled() for _ in exllamav2_load.load_parts(sdk, spec, device="cpu")]
    closed = exllamav2_load.load_parts(sdk, spec, device="cpu")
    next(closed)
    closed.close()

    assert modes == [False, False]
    assert not torch.is_inference_mode_enabled()


class Stream:
    """A CUDA stream that remembers which streams it was told to wait for."""

    def __init__(self, device):
        self.device_index, self.waited = device, []

    def wait_stream(self, other):
        self.waited.append(other)


@pytest.fixture
def cuda(monkeypatch):
    """CUDA as torch tells of it, with the SDK's stream on device 1 and the host's in place."""
    state = SimpleNamespace(device=1, stream=Stream(1), own=Stream(1))

    def set_stream(stream):
        state.device, state.stream = stream.device_index, stream

    for name, value in {
        "is_available": lambda: True,
        "current_stream": lambda: state.stream,
        "set_stream": set_stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    find = SimpleNamespace(get_device_stream=lambda device: state.own if device == 1 else None)
    monkeypatch.setitem(sys.modules, "exllamav2.device", find)
    return state


def test_the_sdk_runs_on_its_stream_and_the_hosts_is_back_after_it_and_waits(cuda):
    host = cuda.stream

    with pytest.raises(ZeroDivisionError), exllamav2_sdk.host_stream_kept():
        assert cuda.stream is cuda.own
        cuda.device = 0
        _ = 1 / 0

    assert (cuda.device, cuda.stream) == (1, host)
    assert (cuda.own.waited, host.waited) == ([host], [cuda.own])


def test_between_the_steps_of_a_generation_neither_stream_waits(cuda):
    host = cuda.stream

    with exllamav2_sdk.host_stream_kept(must_wait=False):
        assert cuda.stream is cuda.own

    assert cuda.stream is host
    assert cuda.own.waited == host.waited == []


@pytest.mark.parametrize(
    ("has_cuda", "device", "words"), [(False, "auto", "no CUDA device"), (True, "cuda:1", "CUDA_VISIBLE")]
)
def test_a_device_that_the_sdk_cannot_start_at_is_refused(monkeypatch, has_cuda, device, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)

    with pytest.raises(EngineUnavailable, match=words):
        exllamav2_load.resolve_device(device)


def test_a_lora_that_is_only_a_pickle_is_refused(open_engine, tmp_path):
    for name in ("adapter_config.json", "adapter_model.bin"):
        (tmp_path / name).touch()

    with pytest.raises(ModelUnsupported, match="may run code when opened"):
        open_engine(options=(("loras", str(tmp_path)),))


def test_a_prompt_of_no_tokens_fails_alone(open_engine):
    engine = open_engine()
    whole = work(engine, PROMPT)
    empty = replace(whole, encoded=replace(whole.encoded, token_ids=()))

    out = run(engine, empty, whole)

    assert [type(step) for step in out[0]] == [FailedStep]
    assert isinstance(out[0][0].error, GenerationFailed)
    assert ids_of(out[1]) == cpu.manual(PROMPT, 16)
