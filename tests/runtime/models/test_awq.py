import json

import numpy as np
import pytest

from runtime.errors import ModelNotFound
from runtime.models.awq import inspect_awq
from tests.runtime.models.awq_writer import TINY_QWEN2, autoawq_config, tiny_qwen2_weights, write_folder


@pytest.fixture(scope="module")
def weights():
    return tiny_qwen2_weights()


@pytest.fixture
def folder(tmp_path, weights):
    return write_folder(tmp_path / "model", TINY_QWEN2, weights)


def edit_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensor(folder, name, edit):
    """Rewrite the file with one header entry or its data changed; `edit(entry, data)` works in place."""
    path = folder / "model.safetensors"
    blob = bytearray(path.read_bytes())
    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])
    start, end = (8 + size + at for at in header[name]["data_offsets"])
    data = blob[start:end]
    edit(header[name], data)
    blob[start:end] = data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(blob[8 + size :]))


@pytest.mark.parametrize(
    ("form", "is_symmetric"), [("autoawq", False), ("compressed-tensors", False), ("compressed-tensors", True)]
)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_whole_folder_is_genuine_and_lists_every_module(tmp_path, weights, form, is_symmetric, dtype):
    folder = write_folder(tmp_path, TINY_QWEN2, weights, form=form, is_symmetric=is_symmetric, dtype=dtype)

    report = inspect_awq(folder)

    assert (report.verdict, report.faults) == ("genuine", ())
    assert len(report.modules) == 14
    assert dict(report.kept).keys() == {"model.embed_tokens", "lm_head"}
    assert report.as_dict()["awq"] == "genuine"
    assert json.loads(json.dumps(report.as_dict()))["group_size"] == 64


def test_modules_that_the_config_skips_are_listed_with_that_reason(tmp_path, weights):
    kept = {**weights, "model.layers.0.extra.weight": np.ones((32, 32), np.float32)}
    folder = write_folder(tmp_path, TINY_QWEN2, kept)
    edit_config(folder, lambda c: c["quantization_config"].update(modules_to_not_convert=["extra"]))

    assert dict(inspect_awq(folder).kept)["model.layers.0.extra"] == "named in the config as not quantised"


def test_a_cut_shard_is_damage(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    assert inspect_awq(folder).verdict == "damaged"


def test_a_missing_shard_is_damage_that_names_the_file(tmp_path, weights):
    folder = write_folder(tmp_path, TINY_QWEN2, weights, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()

    report = inspect_awq(folder)

    assert report.verdict == "damaged"
    assert "model-00002-of-00003.safetensors" in report.reason


def test_zero_points_of_the_wrong_shape_are_damage_that_names_both_shapes(folder):
    edit_tensor(folder, "model.layers.1.mlp.up_proj.qzeros", lambda entry, _: entry.update(shape=[1, 64]))

    report = inspect_awq(folder)

    assert report.verdict == "damaged"
    assert "model.layers.1.mlp.up_proj.qzeros has the shape [1, 64], not [2, 32]" in report.faults


def test_a_scale_that_is_not_a_number_is_damage(folder):
    def spoil(_, data):
        data[0:2] = np.float16("nan").tobytes()

    edit_tensor(folder, "model.layers.0.self_attn.q_proj.scales", spoil)

    [fault] = inspect_awq(folder).faults
    assert fault == "model.layers.0.self_attn.q_proj.scales has 1 values that are not finite in fp16"


def test_a_scale_that_fp16_cannot_hold_is_damage(tmp_path, weights):
    folder = write_folder(tmp_path, TINY_QWEN2, weights, dtype="BF16")

    def spoil(_, data):
        data[0:2] = (0x4980).to_bytes(2, "little")

    edit_tensor(folder, "model.layers.0.self_attn.q_proj.scales", spoil)

    assert inspect_awq(folder).verdict == "damaged"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "gemv"}, '"gemv" layout'),
        ({"version": "gemv_fast"}, '"gemv_fast" layout'),
        ({"bits": 3}, "3 bits"),
        ({"desc_act": True}, "activation order"),
    ],
)
def test_awq_that_cannot_be_expressed_says_why(folder, change, words):
    edit_config(folder, lambda c: c["quantization_config"].update(change))

    report = inspect_awq(folder)

    assert report.verdict == "damaged"
    assert words in report.reason


@pytest.mark.parametrize("group", [16, 48])
def test_a_group_that_the_kernels_do_not_know_is_refused(tmp_path, weights, group):
    even = {n: (np.zeros((96, 96), np.float32) if "_proj.weight" in n else w) for n, w in weights.items()}
    folder = write_folder(tmp_path, TINY_QWEN2, {n: w for n, w in even.items() if not n.endswith("bias")}, group=group)

    assert f"group {group} is no power of two from 32 up" in inspect_awq(folder).reason


def test_odd_sizes_are_refused_by_number(tmp_path, weights):
    odd = {n: w for n, w in weights.items() if "proj" not in n}
    odd["model.layers.0.mlp.up_proj.weight"] = np.ones((40, 64), np.float32)
    folder = write_folder(tmp_path, TINY_QWEN2, odd, group=64)

    assert "40 outputs are not a multiple of 32" in inspect_awq(folder).reason


def test_inputs_in_activation_order_are_refused_and_in_sequence_are_not(tmp_path, weights):
    from tests.runtime.models.awq_writer import pack_quantized_tensors, quantise, write_safetensors

    module = "model.layers.0.mlp.up_proj"
    packed = pack_quantized_tensors(module, quantise(np.random.default_rng(0).normal(size=(64, 128)), 64))
    verdicts = []
    for order in (np.arange(128) // 64, np.arange(128) % 2):
        folder = write_folder(tmp_path / str(len(verdicts)), TINY_QWEN2, weights, form="compressed-tensors")
        write_safetensors(
            folder / "model.safetensors", {**packed, f"{module}.weight_g_idx": ("I32", order.astype(np.int32))}
        )
        verdicts.append(inspect_awq(folder).verdict)

    assert verdicts == ["genuine", "damaged"]


def test_a_tokenizer_with_more_ids_than_the_head_has_rows_is_damage(folder):
    tokenizer = {"model": {"vocab": {"a": 0, "b": 5}}, "added_tokens": [{"id": 160, "content": "<x>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert "the output head has 160 rows, but the tokenizer has ids up to 160" in inspect_awq(folder).faults


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}},
        },
    ],
)
def test_other_folders_are_not_awq(folder, quantization):
    edit_config(folder, lambda c: c.update(quantization_config=quantization))

    assert inspect_awq(folder).verdict == "not_awq"


def test_a_config_that_lies_about_its_tensors_is_damage(tmp_path, weights):
    folder = write_folder(tmp_path, TINY_QWEN2, weights, form="compressed-tensors")
    edit_config(folder, lambda c: c.update(quantization_config=autoawq_config(64)))

    assert "no tensor is called *.qweight" in inspect_awq(folder).reason


def test_a_folder_without_a_config_is_no_model(tmp_path):
    with pytest.raises(ModelNotFound, match="is empty, so it is no model"):
        inspect_awq(tmp_path)
