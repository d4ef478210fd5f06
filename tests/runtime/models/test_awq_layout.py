import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.models.awq_layout import (
    AWQ_ORDER,
    Codes,
    half_from_raw,
    pack_columns,
    pack_for_exllamav2,
    pack_rows,
    read_awq_gemm,
    read_pack_quantized,
    unpack_columns,
    unpack_rows,
)
from tests.runtime.models.awq_writer import autoawq_tensors, bf16, pack_quantized_tensors


def layer(num_in, num_out, group, seed=0):
    """Random codes and scales whose zero points hold 0 and 15 in every one of a word's eight places."""
    random = np.random.default_rng(seed)
    zeros = random.integers(0, 16, (num_in // group, num_out), dtype=np.uint8)
    for place in range(8):
        zeros[0, place], zeros[0, 8 + place] = 0, 15
        zeros[-1, 16 + (7 - place)], zeros[-1, 24 + place] = 15, 0
    zeros[0, 2:5] = 0
    return Codes(
        codes=random.integers(0, 16, (num_in, num_out), dtype=np.uint8),
        zeros=zeros,
        scales=random.normal(0, 0.01, zeros.shape).astype(np.float16),
    )


def bits(weights):
    return weights.view(np.uint16)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_autoawq_repacked_gives_the_same_weights_bit_for_bit(group):
    original = layer(256, 64, group)
    tensors = autoawq_tensors("x", original)
    expected = original.dequantise()

    source = read_awq_gemm(*(tensors[f"x.{part}"][1] for part in ("qweight", "qzeros", "scales")))
    packed = pack_for_exllamav2(source)

    assert np.array_equal(bits(packed.unpack().dequantise()), bits(expected))
    assert packed.num_mirrored == (original.zeros == 0).sum() > 16


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_pack_quantized_repacked_gives_the_same_weights_bit_for_bit(group, is_symmetric):
    original = layer(256, 64, group)
    if is_symmetric:
        original.zeros[:] = 8
    tensors = pack_quantized_tensors("x", original, is_symmetric=is_symmetric)
    expected = original.dequantise()

    zero_point = tensors.get("x.weight_zero_point", (None, None))[1]
    packed = pack_for_exllamav2(
        read_pack_quantized(tensors["x.weight_packed"][1], tensors["x.weight_scale"][1], zero_point)
    )

    assert np.array_equal(bits(packed.unpack().dequantise()), bits(expected))
    assert not is_symmetric or (packed.qzeros.view(np.uint32) == 0x77777777).all()


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("zero", [0, 15])
def test_one_extreme_zero_point_touches_no_neighbour(place, zero):
    original = layer(32, 32, 32)
    original.zeros[:] = 7
    original.zeros[0, place] = zero
    expected = original.dequantise()

    packed = pack_for_exllamav2(original)

    assert np.array_equal(bits(packed.unpack().dequantise()), bits(expected))
    assert packed.unpack().zeros[0].tolist() == [15 if i == place else 7 for i in range(32)]


def test_stored_zero_points_never_wrap():
    packed = pack_for_exllamav2(layer(128, 64, 32))

    assert unpack_columns(packed.qzeros).max() <= 14


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8), st.permutations(range(8)))
def test_unpacking_undoes_packing_for_every_word_and_order(words, order):
    packed = np.array([words], np.uint32).view(np.int32)

    assert np.array_equal(pack_columns(unpack_columns(packed, order), order), packed)
    assert np.array_equal(pack_rows(unpack_rows(packed)), packed)


def test_the_awq_order_is_where_autoawq_puts_its_columns():
    word = np.array([[sum(place << (4 * place) for place in range(8))]], np.uint32).view(np.int32)

    assert unpack_columns(word, AWQ_ORDER)[0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_bf16_scales_become_fp16_and_every_changed_value_is_counted():
    values = np.array([1.0, -0.0078125, 1e-30, 2.0**-24, 1e6], np.float32)

    half, num_changed = half_from_raw(bf16(values), "BF16")

    assert half[:4].tolist() == [1.0, -0.0078125, 0.0, 2.0**-24]
    assert np.isinf(half[4])
    assert num_changed == 2
