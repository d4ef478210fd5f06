"""The fit table against figures of a model of 32 billion parameters that were worked out by hand."""

import argparse

import pytest

from runtime.benchmark import fit
from runtime.benchmark.ceiling import bytes_per_step, kv_bytes_per_token
from runtime.benchmark.fit import RESERVED_BYTES, SCRATCH_BYTES, ceilings, fit_table, fits, fits_here
from runtime.commands import fit as command
from runtime.device_memory import DeviceMemory
from runtime.errors import InvalidValue
from runtime.models.info import KVGeometry, ModelInfo
from runtime.models.safetensors_header import TensorHeader

WEIGHTS_BYTES = 19_000_000_000
LAYERS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 64, 8, 128, 5120, 151_936
KV_BYTES = 262_144
"""Of one token: 64 layers x 8 heads x (128 + 128) elements x 2 bytes = 256 KiB."""


def header(*shape, itemsize=2):
    num_elements = shape[0] * shape[1]
    return TensorHeader(dtype="BF16", shape=shape, file="", start=0, end=num_elements * itemsize)


@pytest.fixture
def info():
    """A 32B in 4 bits with an input embedding and a head of its own in 16 bits."""
    return ModelInfo(
        path="m",
        format="safetensors",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        quant_method="awq",
        quant_config={},
        context_len=40_960,
        num_layers=LAYERS,
        kv=KVGeometry(num_layers=LAYERS, num_heads=KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM),
        vocab_size=VOCAB,
        dtype="bfloat16",
        tensors={
            "model.embed_tokens.weight": (embedding := header(VOCAB, HIDDEN)),
            "lm_head.weight": embedding,
            "model.layers": header(WEIGHTS_BYTES - 2 * embedding.nbytes, 1, itemsize=1),
        },
        config={},
    )


@pytest.mark.parametrize(("kv_cache", "share"), [("fp16", 1), ("q8", 8.5 / 16), ("q4", 4.5 / 16)])
def test_a_token_leaves_256_kib_in_fp16_and_less_when_quantised(info, kv_cache, share):
    assert kv_bytes_per_token(info, kv_cache) == KV_BYTES * share


def test_a_step_reads_the_weights_without_the_input_embedding_and_the_cache(info):
    embedding = VOCAB * HIDDEN * 2

    step = bytes_per_step(info, weights_bytes=WEIGHTS_BYTES, kv_cache="fp16", num_tokens=8192)

    assert step == pytest.approx(WEIGHTS_BYTES - embedding + 8192 * KV_BYTES)


def test_a_batch_reads_the_weights_once_and_each_cache(info):
    one, four = (
        bytes_per_step(info, weights_bytes=WEIGHTS_BYTES, kv_cache="fp16", num_tokens=1000, batch_size=n)
        for n in (1, 4)
    )

    assert four - one == pytest.approx(3 * 1000 * KV_BYTES)


def test_the_longest_context_is_what_is_left_over_the_bytes_of_a_token(info):
    found = {(one.card_gb, one.kv_cache): one.context_len for one in fits(info)}
    left = 24e9 - RESERVED_BYTES - SCRATCH_BYTES - WEIGHTS_BYTES

    assert found[16, "q4"] == 0
    assert found[24, "fp16"] == int(left / KV_BYTES) // 256 * 256 == 13_312
    assert found[24, "q4"] == 40_960
    assert found[80, "fp16"] == 40_960


def test_a_model_beside_it_takes_its_share(info):
    found = {(one.card_gb, one.kv_cache): one.context_len for one in fits(info, beside_bytes=12e9)}

    assert found[24, "q4"] == 0
    assert found[48, "fp16"] == 40_960


def test_the_ceiling_is_bandwidth_over_bytes_and_the_table_says_computed(info):
    step = WEIGHTS_BYTES - VOCAB * HIDDEN * 2 + 2048 * KV_BYTES

    assert ceilings(info, num_tokens=2048)["RTX 4090"] == pytest.approx(1008e9 / step)
    assert fit_table(info).startswith("Computed, not measured: 19.00 GB")


def test_this_machine_counts_in_the_types_that_it_will_use(info, monkeypatch):
    facts = {"engine": "transformers", "device": "cpu", "dtype": "fp32", "kv_cache": "fp32", "bytes_per_token": 1000}
    monkeypatch.setattr(fit, "here", lambda _: facts)
    monkeypatch.setattr(fit, "weights_bytes", lambda info, dtype: {"fp32": 4 * 10**9}[dtype])
    monkeypatch.setattr(fit, "read_memory", lambda name: DeviceMemory(device=name, total=8 * 10**9, free=4_005_000_000))

    assert fits_here(info)["context_len"] == 5000
    assert (
        "This machine: transformers on cpu in fp32 takes 4.0 GB of weights and 1000 bytes a token of fp32 KV cache: "
        "5000 tokens fit into the 4.0 GB that are free now."
    ) in fit_table(info)


def test_a_model_that_nothing_here_can_run_has_no_line_for_this_machine(info):
    assert fits_here(info) is None
    assert "This machine" not in fit_table(info)


@pytest.mark.parametrize("words", [["--beside", "nan"], ["--beside", "inf"], ["--beside", "-1"], ["--tokens", "-5"]])
def test_a_size_that_is_none_is_told(words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    with pytest.raises(InvalidValue, match=rf"^{words[0]} is {words[1]}"):
        command.run(parser.parse_args(["m", *words]))
