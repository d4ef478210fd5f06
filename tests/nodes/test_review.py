"""Review Text and Text Lines."""

import pytest


@pytest.fixture
def review(pack):
    return pack("nodes.review")


def test_without_an_edit_the_text_passes_through(review):
    assert review.passed_on("a cat", "", False, "") == "a cat"
    assert review.passed_on("a cat", "", True, "") == "a cat"


def test_an_edit_counts_for_the_text_that_it_was_made_of(review):
    mark = review.mark_of("a cat")

    assert review.passed_on("a cat", "a tiger", False, mark) == "a tiger"
    assert review.passed_on("a dog", "a tiger", False, mark) == "a dog"


def test_a_held_edit_counts_for_every_text(review):
    assert review.passed_on("a dog", "a tiger", True, review.mark_of("a cat")) == "a tiger"


def test_an_edit_of_no_text_in_particular_counts_for_every_text(review):
    assert review.passed_on("a dog", "a tiger", False, "") == "a tiger"
