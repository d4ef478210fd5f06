"""The sums of the overhead benchmark."""

from __future__ import annotations

import pytest

from tools.bench import node_of, summary


def test_the_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_the_medians():
    row = summary([10.0, 5.0, 9.0], [10.0, 5.0, 20.0], 64)

    assert (row["ratio"], row["node_tokens_per_s"], row["bare_tokens_per_s"]) == (1.0, 9.0, 10.0)


def test_a_class_that_stands_twice_in_a_prompt_names_no_node():
    with pytest.raises(ValueError):
        node_of({"1": {"class_type": "A"}, "2": {"class_type": "A"}}, "A")
