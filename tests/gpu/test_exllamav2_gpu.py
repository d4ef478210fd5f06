"""ExLlamaV2 on a real GPU: the rows of the bench's proofs, as tests."""

import os
import sys
from pathlib import Path

import pytest

from runtime.engines import exllamav2_install

BENCH = Path(__file__).parents[2] / "bench"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        exllamav2_install.why_unavailable() is not None, reason=str(exllamav2_install.why_unavailable())
    ),
]


@pytest.fixture(scope="module")
def bench():
    """The bench's modules, which stand beside each other without a package."""
    sys.path.insert(0, str(BENCH))
    try:
        import exl2_checks
        import exl2_models
    finally:
        sys.path.remove(str(BENCH))
    return exl2_checks, exl2_models


@pytest.fixture(scope="module")
def models(bench, model_path, tmp_path_factory):
    """(AWQ folder, 16-bit folder of the same weights), and the vocabulary's size."""
    root = tmp_path_factory.mktemp("exl2")
    os.environ["RESIDENT_LLM_CACHE"] = str(root / "cache")
    yield *bench[1].small_pair(root, model_path), bench[1].SMALL["vocab"]
    del os.environ["RESIDENT_LLM_CACHE"]


def faults(rows):
    return [row for row in rows if not row["ok"]]


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa", "eager"])
def test_the_engine_contract_holds_for_every_attention(bench, models, attention):
    assert faults(bench[0].contract(models[0], models[2], attention)) == []


def test_no_attention_sees_the_future_and_without_a_remedy_it_would(bench, models):
    assert faults(bench[0].causality(models[1], models[2])) == []


def test_repacked_awq_says_what_its_dequantised_weights_say(bench, models, tmp_path):
    assert faults(bench[0].equality(*models, tmp_path)) == []


def test_drafting_changes_neither_text_nor_length(bench, models):
    assert faults(bench[0].drafting(models[0], models[2])) == []


def test_quantised_caches_agree_with_the_16_bit_one(bench, models):
    assert faults(bench[0].kv_precision(models[1], models[2])) == []
