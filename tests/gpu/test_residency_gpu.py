"""On a real GPU, with ComfyUI's real ledger and a model of about 1 GB: leave completely, come back, stay flat."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

from bench import gpu_residency as steps  # noqa: E402
from bench.synthetic_llm import Shape, write  # noqa: E402
from tests.nodes.ledger import comfy_folder, why_no_host  # noqa: E402

SMALL = Shape(hidden=2048, num_layers=8, num_heads=16, num_kv_heads=4, ffn=5632, vocab=32000)
CARRIED = Path(os.environ.get("RESIDENT_COMFY", Path(__file__).resolve().parents[2] / ".build" / "carry"))


def comfy_path():
    if (CARRIED / "comfy" / "model_management.py").is_file():
        return CARRIED
    if why_no_host() is None:
        return comfy_folder().parent
    return None


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    comfy = comfy_path()
    if comfy is None:
        pytest.skip("no ComfyUI: run python -m tools.carry_comfy where it is installed, and bring .build/carry")
    folder = tmp_path_factory.mktemp("gpu")
    write(folder / "llm", SMALL, "cuda")
    flags = ["--comfy", str(comfy), "--out", str(folder), "--model", str(folder / "llm")]
    bench = steps.Bench(steps.parse([*flags, "--diffusion-gb", "4", "--left-free-gb", "1.5", "--cycles", "10"]))
    steps.first_load(bench)
    yield bench
    bench.runtime.close()


@pytest.fixture(scope="module")
def full_card(bench):
    weight = steps.ballast(bench)
    yield bench
    del weight
    torch.cuda.empty_cache()


def test_the_bytes_told_before_loading_are_those_that_the_device_counts(bench):
    told, counted = (bench.results["first_load"][name]["device"] for name in ("bytes_computed", "bytes_counted"))

    assert abs(told - counted) < 0.02 * counted
    assert abs(bench.results["first_load"]["device_bytes"] - counted) < steps.TOLERANCE_BYTES


def test_decoding_makes_no_segment_no_retry_and_moves_no_buffer(bench):
    steps.decoding_allocates_nothing(bench)

    assert bench.results["decode_200"]["is_flat"]


def test_it_leaves_for_a_diffusion_model_and_comes_back_with_the_same_text(full_card):
    steps.evict_and_return(full_card, "eviction")

    row = full_card.results["eviction"]
    assert row["left_bytes"] == 0
    assert abs(row["missing_bytes"]) < steps.TOLERANCE_BYTES
    assert row["host_copy_bytes"] > 0
    assert row["diffusion_left_bytes"] == 0
    assert row["has_same_text"]


def test_a_model_moved_behind_our_back_is_loaded_again(full_card):
    with full_card.runtime.lease(full_card.spec()) as engine:
        engine._model.to("cpu")

    text, _, _ = full_card.generate("hello " * 20, 32)

    assert text in full_card.texts


def test_ten_cycles_leave_device_memory_where_it_was(full_card):
    steps.cycles(full_card, stop_at_s=0)

    assert full_card.results["cycles"]["free_bytes_spread"] < 50_000_000


def test_after_unloading_the_device_has_what_it_had_before(bench):
    steps.everything_gone(bench)

    assert bench.results["after_unload"]["is_within_300_mb"]
