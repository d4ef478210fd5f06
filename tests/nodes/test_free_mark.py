import pytest

from tests.nodes.ledger import pack_module


@pytest.fixture
def mark():
    return pack_module("nodes.free_mark").FreeMark()


def test_the_fingerprint_changes_with_a_load_and_not_by_freeing(mark):
    at_first_prompt = mark.fingerprint(0)
    mark.freed(1)  # the prompt loaded one model, then freed it
    unchanged = mark.fingerprint(1)
    after_another_load = mark.fingerprint(2)

    assert at_first_prompt == unchanged
    assert after_another_load != unchanged


def test_two_nodes_of_one_prompt_both_stay_cached_when_nothing_was_loaded(mark):
    first = [mark.fingerprint(0), mark.fingerprint(0)]
    mark.freed(1)
    mark.freed(2)

    assert [mark.fingerprint(2), mark.fingerprint(2)] == first
