import gc
import json
import shutil
import weakref

import pytest

from runtime import GREEDY, ModelSpec, Prompt
from runtime.engines import footprint, load
from runtime.engines.base import DecodeStep, Work
from runtime.errors import (
    EngineUnavailable,
    InvalidValue,
    ModelLoadFailed,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
)
from runtime.events import LoadProgress
from tests.tiny import make_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def spec_of(folder, **fields):
    return ModelSpec(model=str(folder), **{"engine": "transformers", "device": "cpu", **fields})


def loaded(spec):
    """(engine, progress)"""
    loading, progress = load(spec), []
    while True:
        try:
            progress.append(next(loading))
        except StopIteration as end:
            return end.value, progress


def greedy(engine, text="hello", count=8):
    work = Work(encoded=engine.encode(Prompt.of(text)), sampling=GREEDY, max_tokens=count, seed=0)
    return [one for _, step in engine.generate([work]) if isinstance(step, DecodeStep) for one in step.token_ids]


@pytest.fixture
def copy_of(tiny, tmp_path):
    """A copy of a tiny model's folder that a test may damage."""

    def of(kind="llama"):
        return shutil.copytree(tiny(kind), tmp_path / kind)

    return of


def edit(file, **changes):
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **changes}))


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def break_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def break_config(folder):
    (folder / "config.json").write_text("{")


def wrong_width(folder):
    edit(folder / "config.json", intermediate_size=128)


def more_layers(folder):
    edit(folder / "config.json", num_hidden_layers=3, layer_types=None)


def unknown_type(folder):
    edit(folder / "config.json", model_type="made_up")


def own_code(folder):
    edit(folder / "config.json", model_type="made_up", auto_map={"AutoModelForCausalLM": "model.Made"})
    (folder / "model.py").write_text("raise SystemExit('this must never run')")


def no_language(folder):
    edit(folder / "config.json", model_type="vit")


def fewer_rows(folder):
    edit(folder / "config.json", vocab_size=300)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    extra = {**tokenizer["added_tokens"][-1], "id": 400, "content": "<one too many>"}
    tokenizer["added_tokens"] += [{**extra, "id": at, "content": f"<extra {at}>"} for at in range(261, 311)]
    file.write_text(json.dumps(tokenizer))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (cut_weights, ModelLoadFailed, "cut off"),
        (drop_tokenizer, ModelLoadFailed, "no tokenizer"),
        (break_tokenizer, ModelLoadFailed, "tokenizer"),
        (break_config, ModelLoadFailed, "no JSON"),
        (wrong_width, ModelLoadFailed, r"do not belong together: .*mlp.* is \[.*64.*\], .* asks for \[.*128.*\]"),
        (more_layers, ModelLoadFailed, r"\d+ of \d+ weights are missing .*layers\.2\."),
        (unknown_type, ModelUnsupported, "'made_up', which is unknown to transformers"),
        (own_code, ModelUnsupported, "code of its own, which is never run"),
        (no_language, ModelUnsupported, "no text generation"),
        (fewer_rows, ModelLoadFailed, "has 311 ids, but the model has 300 rows"),
        (empty, ModelNotFound, "is empty"),
    ],
)
def test_a_broken_folder_gives_one_sentence(copy_of, damage, error, words):
    folder = copy_of()
    damage(folder)

    with pytest.raises(error, match=words) as raised:
        loaded(spec_of(folder))

    assert "\n" not in str(raised.value)


def test_a_missing_shard_is_named(tmp_path):
    folder = make_model(tmp_path / "sharded", shard_bytes=20_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()

    with pytest.raises(ModelLoadFailed, match=shards[1].name):
        loaded(spec_of(folder))


def test_shards_give_the_same_model_as_one_file(tiny, tmp_path):
    whole, _ = loaded(spec_of(tiny("llama")))
    sharded, _ = loaded(spec_of(make_model(tmp_path / "sharded", shard_bytes=20_000)))

    assert greedy(sharded) == greedy(whole)


@pytest.mark.parametrize("kind", ["llama", "untied", "qwen3_5", "qwen3_moe"])
def test_progress_grows_byte_by_byte_to_the_whole(tiny, kind):
    _, progress = loaded(spec_of(tiny(kind)))

    dones = [step.done for step in progress]
    assert dones == sorted(dones)
    assert dones[-1] == progress[-1].total == footprint(spec_of(tiny(kind))).weights
    assert all(isinstance(step, LoadProgress) and step.unit == "bytes" for step in progress)
    assert len(progress) > 10


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_closing_a_load_drops_what_was_read_and_the_next_load_is_whole(tiny, kind, monkeypatch):
    from runtime.engines import transformers_load

    read, alive = transformers_load.read_tensor, []

    def watched(header):
        tensor = read(header)
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(transformers_load, "read_tensor", watched)
    loading = load(spec_of(tiny(kind)))
    for _ in range(7):
        next(loading)
    num_read = len(alive)

    loading.close()

    gc.collect()
    assert 1 < num_read < 10
    assert not [one for one in alive if one() is not None]
    assert greedy(loaded(spec_of(tiny(kind)))[0])


def test_every_weight_is_the_one_in_the_file(tiny):
    safetensors = pytest.importorskip("safetensors.torch")
    for kind in ("llama", "untied", "qwen3_5"):
        engine, _ = loaded(spec_of(tiny(kind)))
        stored = safetensors.load_file(tiny(kind) / "model.safetensors")

        for name, parameter in engine._model.named_parameters():
            assert parameter.device.type == "cpu"
            assert torch.equal(parameter, stored[name].to(parameter.dtype)), name


def test_a_file_that_changes_after_loading_changes_nothing(copy_of):
    folder = copy_of()
    engine, _ = loaded(spec_of(folder))
    before = greedy(engine)

    (folder / "model.safetensors").write_bytes(b"")

    assert greedy(engine) == before


def test_the_text_part_of_a_multimodal_folder_loads(tiny, tmp_path):
    if not hasattr(transformers, "Qwen3_5Config"):
        pytest.skip("this transformers has no Qwen3.5")
    folder = shutil.copytree(tiny("qwen3_5"), tmp_path / "vision")
    text = json.loads((folder / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    config |= {"text_config": text, "vision_config": vision, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    rename_tensors(folder / "model.safetensors", lambda name: name.replace("model.", "model.language_model.", 1))

    engine, _ = loaded(spec_of(folder))

    assert greedy(engine) == greedy(loaded(spec_of(tiny("qwen3_5")))[0])


def rename_tensors(file, rename):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {rename(name): tensor.clone() for name, tensor in safetensors.load_file(file).items()}
    tensors["model.visual.patch.weight"] = torch.zeros(4)
    safetensors.save_file(tensors, file, metadata={"format": "pt"})


def test_loading_inside_inference_mode_gives_a_model_that_runs_outside(tiny):
    with torch.inference_mode():
        engine, _ = loaded(spec_of(tiny("llama")))
        inside = greedy(engine)

    assert greedy(engine) == inside
    assert not any(parameter.is_inference() for parameter in engine._model.parameters())


def test_neither_loading_nor_generating_leaves_the_thread_changed(tiny):
    before = torch.get_rng_state(), torch.get_default_dtype()
    loading = load(spec_of(tiny("llama"), dtype="bf16"))
    next(loading)
    assert not torch.is_inference_mode_enabled()
    engine, _ = loaded(spec_of(tiny("llama"), dtype="bf16"))
    steps = engine.generate([Work(encoded=engine.encode(Prompt.of("x")), sampling=GREEDY, max_tokens=3, seed=0)])

    for _ in steps:
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.get_default_dtype()


def test_dtype_is_what_was_asked_for_and_its_bytes_are_computed(tiny):
    spec = spec_of(tiny("llama"), dtype="bf16", kv_cache="fp32", context_len=64)

    engine, _ = loaded(spec)

    assert (engine.info.dtype, engine.info.kv_cache) == ("bf16", "fp32")
    assert engine.bytes.kv_cache == footprint(spec).kv_cache
    assert greedy(engine)


def test_flash_attention_falls_back_with_the_reason(tiny):
    engine, _ = loaded(spec_of(tiny("llama"), attention="flash_attention_2"))

    assert engine.info.attention == "sdpa"
    assert any("flash_attention_2 is not used: it needs a CUDA device" in one for one in engine.info.warnings)


def test_eager_attention_is_reported_and_gives_the_same_tokens(tiny):
    eager, _ = loaded(spec_of(tiny("llama"), attention="eager"))
    sdpa, _ = loaded(spec_of(tiny("llama")))

    assert (eager.info.attention, sdpa.info.attention) == ("eager", "sdpa")
    assert greedy(eager) == greedy(sdpa)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"context_len": 4096}, ModelUnsupported, "4096 is 2048 over the 2048 positions"),
        ({"kv_cache": "q4"}, ModelUnsupported, "'q4' is not for the transformers engine.*exllamav2"),
        ({"dtype": "int8"}, ModelUnsupported, "'int8'; it is one of auto"),
        ({"attention": "paged"}, ModelUnsupported, "'paged'; the transformers engine has auto"),
        ({"device": "cuda:99"}, EngineUnavailable, "no device cuda:99"),
        ({"device": "sofa"}, InvalidValue, "device is 'sofa'"),
        ({"device": "mps"}, EngineUnavailable, "no device mps"),
        ({"device": "xpu:0"}, EngineUnavailable, "no device xpu:0: this machine shows 0 XPU"),
    ],
)
def test_what_cannot_be_is_refused_in_words(tiny, fields, error, words):
    with pytest.raises(error, match=words):
        loaded(spec_of(tiny("llama"), **fields))


def test_auto_picks_this_engine_for_a_plain_folder(tiny):
    engine, _ = loaded(spec_of(tiny("llama"), engine="auto"))

    assert engine.info.engine == "transformers"


def test_torchs_own_out_of_memory_stays_the_cause(tiny, monkeypatch):
    engine, _ = loaded(spec_of(tiny("llama")))

    def full(*_args, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._model, "forward", full)
    with pytest.raises(OutOfMemory, match="ran out while generating") as raised:
        greedy(engine)

    assert isinstance(raised.value.__cause__, torch.cuda.OutOfMemoryError)
    monkeypatch.undo()
    assert greedy(engine) == greedy(loaded(spec_of(tiny("llama")))[0])


def test_a_rope_base_written_by_either_transformers_is_used(copy_of, tiny):
    folder = copy_of()
    edit(folder / "config.json", rope_parameters={"rope_theta": 31000.0, "rope_type": "default"}, rope_theta=None)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))

    engine, _ = loaded(spec_of(folder))

    table = engine._model.model.rotary_emb.inv_freq
    assert table[1].item() == pytest.approx(31000.0 ** (-1 / len(table)))
