import pytest

from runtime.models.suggestions import RESERVE_BYTES, SUGGESTIONS, advice, suggest


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24, 48, 80])
def test_three_models_fit_the_card_the_largest_of_each_kind_among_them(gigabytes):
    card = gigabytes * 10**9

    chosen = suggest(card)

    assert len(set(chosen)) == 3
    assert all(one.num_bytes + RESERVE_BYTES <= card for one in chosen)
    for kind in {one.runs_in for one in chosen}:
        fitting = [one for one in SUGGESTIONS if one.runs_in == kind and one.num_bytes + RESERVE_BYTES <= card]
        assert fitting[-1] in chosen


@pytest.mark.parametrize("card", [None, 0, 2 * 10**9])
def test_without_a_known_card_the_smallest_are_named(card):
    assert suggest(card) == SUGGESTIONS[:3]


def test_a_card_of_24_gb_is_told_one_of_each_kind_and_the_command_for_one_that_any_engine_runs():
    text = advice(24 * 10**9)

    assert "for a card of 24.0 GB" in text
    assert "Qwen/Qwen3-32B-AWQ (about 19.3 GB, for ExLlamaV2 or a server)" in text
    assert "Qwen/Qwen3-32B-GGUF (about 19.8 GB, for llama.cpp)" in text
    assert text.endswith("python -m runtime download Qwen/Qwen3-8B")


def test_of_a_repository_with_many_files_the_command_names_one():
    [one] = [one for one in SUGGESTIONS if one.repo == "Qwen/Qwen3-4B-GGUF"]

    assert one.arguments == 'Qwen/Qwen3-4B-GGUF --only "*Q4_K_M*"'
