import pytest

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime, collect
from runtime.engines.base import DecodeStep, Work
from tests.tiny import KINDS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def spec_of(folder, **fields):
    return ModelSpec(model=str(folder), engine="transformers", device="cpu", **fields)


def reference(folder, ids, count):
    """What transformers' own generate gives, greedily, without stopping."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(ids) :].tolist()


def answer_ids(engine, request):
    encoded = engine.encode(request.prompt)
    work = Work(encoded=encoded, sampling=request.sampling, max_tokens=request.max_tokens, seed=request.seed)
    steps = [step for _, step in engine.generate([work]) if isinstance(step, DecodeStep)]
    return encoded.token_ids, [one for step in steps for one in step.token_ids]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_token_for_token(tiny, kind):
    folder = tiny(kind)
    request = Request(prompt=Prompt.of("a windmill at dusk, " * 4), sampling=GREEDY, max_tokens=24)

    with Runtime().lease(spec_of(folder)) as engine:
        prompt_ids, ids = answer_ids(engine, request)

    assert ids == reference(folder, prompt_ids, 24)[: len(ids)]
    assert len(ids) == 24 or ids[-1] == 258


def test_a_model_answers_through_the_runtime(tiny):
    spec = spec_of(tiny("llama"))
    requests = [Request(prompt=Prompt.of(text), sampling=GREEDY, max_tokens=8) for text in ("a", "b")]
    runtime = Runtime()

    collector = collect(runtime.generate(spec, requests), spec, requests)

    [resident] = runtime.residents()
    for result in collector.results(resident.info, resident.bytes):
        assert result.report["num_output_tokens"] <= 8
        assert result.report["attention"] == "sdpa"
        assert result.report["bytes"]["weights"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on this machine auto is not the CPU")
def test_auto_and_what_it_means_here_share_one_loaded_model_and_anything_else_does_not(tiny):
    auto = ModelSpec(model=str(tiny("llama")))
    named = {"engine": "transformers", "device": "cpu", "dtype": "float32", "attention": "sdpa", "kv_cache": "fp32"}
    runtime = Runtime()

    with runtime.lease(auto) as first, runtime.lease(ModelSpec(model=auto.model, context_len=1024)) as shorter:
        pass
    with runtime.lease(auto) as again, pytest.raises(RuntimeError, match="leased twice"):
        runtime.lease(ModelSpec(model=auto.model, context_len=2048, **named)).__enter__()

    assert shorter is not first
    assert again is first
    assert first.info.made_for == 2048
