import pytest

from runtime.models.suggestions import RESERVE_BYTES, SUGGESTIONS, advice, suggest


@pytest.mark.parametrize("gigabytes", [8, 12, 16, 24, 48, 80])
def test_three_models_fit_the_card_and_the_largest_that_fits_is_the_last(gigabytes):
    card = gigabytes * 10**9

    chosen = suggest(card)

    assert len(chosen) == 3
    assert all(one.num_bytes + RESERVE_BYTES <= card for one in chosen)
    assert chosen[-1] == [one for one in SUGGESTIONS if one.num_bytes + RESERVE_BYTES <= card][-1]


@pytest.mark.parametrize("card", [None, 0, 2 * 10**9])
def test_without_a_known_card_the_smallest_are_named(card):
    assert suggest(card) == SUGGESTIONS[:3]


def test_the_command_names_a_model_that_any_engine_runs():
    text = advice(24 * 10**9)

    assert "for a card of 24.0 GB" in text and "Qwen/Qwen3-32B-AWQ (about 19.3 GB, for ExLlamaV2 or a server)" in text
    assert text.endswith("/runtime download Qwen/Qwen3-8B")
