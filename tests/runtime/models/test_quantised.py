import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime import GREEDY, ModelSpec, Prompt, Request, Runtime, collect, engines
from runtime.engines import transformers_load
from runtime.errors import ModelUnsupported
from runtime.models.info import read_model
from runtime.models.quantised import why_not_in_transformers
from runtime.models.safetensors_header import read_headers
from tests.runtime.models.awq_writer import TINY_QWEN2, tiny_qwen2_weights, write_folder


def without(monkeypatch, *modules):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else found(name))


@pytest.mark.parametrize(
    ("form", "module", "package"),
    [("autoawq", "gptqmodel", "gptqmodel"), ("compressed-tensors", "compressed_tensors", "compressed-tensors")],
)
def test_a_4bit_folder_that_nothing_here_reads_names_the_three_ways(tmp_path, monkeypatch, form, module, package):
    folder = str(write_folder(tmp_path, TINY_QWEN2, tiny_qwen2_weights(), form=form))
    without(monkeypatch, module)
    monkeypatch.delitem(sys.modules, module, raising=False)

    with pytest.raises(ModelUnsupported) as caught:
        engines.choose(ModelSpec(model=folder))
    with pytest.raises(ModelUnsupported) as named:
        next(transformers_load.load_folder(SimpleNamespace(model=read_model(folder), name="m"), "sdpa"))

    assert str(named.value).removeprefix("m: ").removesuffix(".") in str(caught.value)
    for way in (f"the package {package}, which is not installed", "ExLlamaV2, which repacks", "vLLM"):
        assert way in str(caught.value)


def test_with_its_package_a_4bit_folder_is_left_to_transformers(tmp_path, monkeypatch):
    folder = str(write_folder(tmp_path, TINY_QWEN2, tiny_qwen2_weights()))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))

    assert why_not_in_transformers(read_model(folder)) is None


def test_exl2_is_never_given_to_transformers():
    assert "ExLlamaV2's own" in why_not_in_transformers(SimpleNamespace(quant_method="exl2"))


def test_plain_weights_need_no_package(tmp_path):
    folder = write_folder(tmp_path, TINY_QWEN2, tiny_qwen2_weights())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))

    assert why_not_in_transformers(read_model(str(folder))) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "package", "is_symmetric"),
    [("autoawq", "gptqmodel", False), ("compressed-tensors", "compressed_tensors", True)],
)
def test_a_real_model_in_4_bit_answers_through_transformers_on_the_cpu(
    form, package, is_symmetric, model_path, tmp_path, monkeypatch
):
    pytest.importorskip(package, reason="`make test-slow` has an environment with it")
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")
    config = json.loads((model_path / "config.json").read_text())
    weights = {
        name: np.fromfile(one.file, np.float32, one.num_elements, offset=one.start).reshape(one.shape)
        for name, one in read_headers(model_path).items()
    }
    settings = {**config, "dtype": "bfloat16"}
    folder = write_folder(
        tmp_path / "4bit", settings, weights, group=64, dtype="BF16", form=form, is_symmetric=is_symmetric
    )
    for file in model_path.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    for name in ("chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((model_path / name).read_bytes())
    spec = ModelSpec(model=str(folder), engine="transformers", device="cpu")
    request = Request(prompt=Prompt.of("What is the capital of France?"), sampling=GREEDY, max_tokens=12)
    torch.set_num_threads(2)

    runtime = Runtime()
    events = list(runtime.generate(spec, [request]))
    [resident] = runtime.residents()
    [result] = collect(events, spec, [request]).results(resident.info, resident.bytes)
    runtime.close()

    assert "Paris" in result.text


@pytest.mark.slow
def test_a_layout_that_transformers_reads_otherwise_is_told_with_what_else_runs_it(tmp_path):
    pytest.importorskip("compressed_tensors", reason="`make test-slow` has an environment with it")
    folder = write_folder(tmp_path / "4bit", TINY_QWEN2, tiny_qwen2_weights(), form="compressed-tensors")
    plan = SimpleNamespace(model=read_model(str(folder)), name="m", device="cpu", dtype=torch.bfloat16)

    with pytest.raises(ModelUnsupported, match=r"in another way .* tensors, .*zero_point.* ExLlamaV2, .* vLLM"):
        list(transformers_load.load_folder(plan, "eager"))
