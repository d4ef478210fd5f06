"""From a folder to an engine, or to a sentence."""

import json

import pytest
import torch

from runtime import ModelSpec
from runtime.engines import exllamav2_load
from runtime.errors import EngineUnavailable, ModelLoadFailed, ModelUnsupported, OutOfMemory
from runtime.events import LoadProgress
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.models.awq_writer import TINY_QWEN2, tiny_qwen2_weights, write_folder


def test_loading_shows_progress_and_the_report_says_what_runs(open_engine):
    engine = open_engine()

    assert engine.progress[-1] == LoadProgress(done=2, total=2, unit="layers")
    assert (engine.info.attention, engine.info.kv_cache, engine.info.context_len) == ("flash_attention_2", "fp16", 1024)


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


@pytest.mark.parametrize(
    ("has_cuda", "device", "words"), [(False, "auto", "no CUDA device"), (True, "cuda:1", "CUDA_VISIBLE")]
)
def test_a_device_that_the_sdk_cannot_start_at_is_refused(monkeypatch, has_cuda, device, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)

    with pytest.raises(EngineUnavailable, match=words):
        exllamav2_load.resolve_device(device)
