import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import ModelLoadFailed, ModelUnsupported
from runtime.models.awq import inspect_awq, read_half, read_tensor
from runtime.models.awq_layout import Packed
from runtime.models.repack import find_differences, read_layer, repack, repacked_folder
from runtime.models.safetensors_header import read_headers
from tests.runtime.models.awq_writer import TINY_QWEN2, tiny_qwen2_weights, write_folder
from tests.runtime.models.qwen2_numpy import logits

FORMS = [("autoawq", False), ("compressed-tensors", False), ("compressed-tensors", True)]


def finish(generator):
    """Drain a generator: (what it yielded, what it returned)."""
    yielded = []
    while True:
        try:
            yielded.append(next(generator))
        except StopIteration as end:
            return yielded, end.value


@pytest.fixture(scope="module")
def weights():
    return tiny_qwen2_weights()


@pytest.fixture
def folder(tmp_path, weights):
    return write_folder(tmp_path / "model", TINY_QWEN2, weights, num_shards=2)


def as_floats(header):
    return read_half(header)[0].astype(np.float64)


def dequantised(folder, read_module):
    """All weights of a folder as [out, in] arrays; `read_module(module)` gives the 4-bit ones."""
    headers = read_headers(folder)
    plain = {n: as_floats(h) for n, h in headers.items() if h.dtype in ("F16", "BF16") and n.count("scale") == 0}
    return {**plain, **{f"{m}.weight": w.T for m, w in read_module(headers).items()}}


def source_weights(folder):
    report = inspect_awq(folder)
    return dequantised(folder, lambda h: {m: read_layer(m, report.scheme, h)[0].dequantise() for m in report.modules})


def repacked_weights(folder):
    def read(headers):
        modules = [name.removesuffix(".qweight") for name in headers if name.endswith(".qweight")]
        return {
            m: Packed(
                qweight=read_tensor(headers[f"{m}.qweight"]),
                qzeros=read_tensor(headers[f"{m}.qzeros"]),
                scales=read_half(headers[f"{m}.scales"])[0],
            )
            .unpack()
            .dequantise()
            for m in modules
        }

    return dequantised(folder, read)


@pytest.mark.parametrize(("form", "is_symmetric"), FORMS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_the_repacked_model_computes_exactly_the_same_logits(tmp_path, weights, form, is_symmetric, dtype):
    source = write_folder(
        tmp_path / "m", TINY_QWEN2, weights, form=form, is_symmetric=is_symmetric, dtype=dtype, num_shards=2
    )
    ids = np.random.default_rng(1).integers(0, 160, 40)

    _, target = finish(repack(source, tmp_path / "cache"))

    assert list(find_differences(source, target)) == []
    expected = logits(TINY_QWEN2, source_weights(source), ids, 1e6)
    assert np.array_equal(logits(TINY_QWEN2, repacked_weights(target), ids, 1e6), expected)
    float_logits = logits(TINY_QWEN2, weights, ids, 1e6)
    assert np.corrcoef(expected.ravel(), float_logits.ravel())[0, 1] > 0.95


def test_the_config_is_what_exllamav2_reads_rightly(tmp_path, folder):
    _, target = finish(repack(folder, tmp_path / "cache"))

    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": False,
    }
    assert config["rope_theta"] == 1000000.0
    assert not any(name.endswith("g_idx") for name in read_headers(target))
    assert read_headers(target)["model.layers.0.self_attn.q_proj.bias"].dtype == "F16"


def test_tensors_that_were_not_quantised_are_copied_byte_for_byte(tmp_path, folder):
    _, target = finish(repack(folder, tmp_path / "cache"))

    before, after = read_headers(folder), read_headers(target)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert np.array_equal(read_tensor(before[name]), read_tensor(after[name]))


def test_progress_counts_every_byte_of_the_weights(tmp_path, folder):
    progress, target = finish(repack(folder, tmp_path / "cache"))

    sizes = [h.end - h.start for h in read_headers(target).values()]
    assert [p.done for p in progress] == sorted({p.done for p in progress})
    assert progress[-1].done == progress[-1].total == sum(sizes)


def test_a_second_repack_does_nothing_and_a_changed_source_makes_a_new_one(tmp_path, folder):
    _, first = finish(repack(folder, tmp_path / "cache"))
    progress, again = finish(repack(folder, tmp_path / "cache"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "extra": 1}))

    assert (progress, again) == ([], first)
    assert repacked_folder(folder, tmp_path / "cache") != first


@pytest.mark.parametrize("how", ["closed", "crashed"])
def test_a_repack_that_is_cut_off_leaves_nothing(tmp_path, folder, how, monkeypatch):
    making = repack(folder, tmp_path / "cache")
    for _ in range(5):
        next(making)

    if how == "closed":
        making.close()
    else:
        monkeypatch.setattr("runtime.models.repack.pack_layer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finish(making)

    assert list((tmp_path / "cache" / "repacked").iterdir()) == []


def test_the_users_folder_is_only_read(tmp_path, folder):
    before = {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.iterdir()}

    finish(repack(folder, tmp_path / "cache"))

    assert {f.name: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.iterdir()} == before


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, folder, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))

    with pytest.raises(ModelLoadFailed, match=r"needs .* where 1\.0 kB are free.*RESIDENT_LLM_CACHE"):
        finish(repack(folder, tmp_path / "cache"))

    assert not (tmp_path / "cache").exists()


def test_damage_in_the_repack_is_found(tmp_path, folder):
    _, target = finish(repack(folder, tmp_path / "cache"))
    header = read_headers(target)["model.layers.1.mlp.down_proj.qweight"]
    blob = bytearray(Path(header.file).read_bytes())
    blob[header.start] ^= 1
    Path(header.file).write_bytes(blob)

    assert list(find_differences(folder, target)) == ["model.layers.1.mlp.down_proj: 1 of 32768 weights differ."]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.v_proj.bias"])
def test_damage_in_a_copied_tensor_is_found_too(tmp_path, folder, name):
    _, target = finish(repack(folder, tmp_path / "cache"))
    header = read_headers(target)[name]
    blob = bytearray(Path(header.file).read_bytes())
    blob[header.start] ^= 1
    Path(header.file).write_bytes(blob)

    assert list(find_differences(folder, target)) == [f"{name} differs."]


def test_a_folder_that_is_no_awq_is_refused(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))

    with pytest.raises(ModelUnsupported, match="config says fp8"):
        finish(repack(folder, tmp_path / "cache"))


def test_a_config_without_a_rotary_base_is_refused(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelUnsupported, match="rope_theta"):
        finish(repack(folder, tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
