from hypothesis import given
from hypothesis import strategies as st

from runtime.kv_cache import Kept, KeptPrefixes, common_length, usable_length

ids = st.lists(st.integers(0, 2), max_size=12)


def kept(*the_ids, num_bytes=10, boundaries=None):
    return Kept(ids=the_ids, boundaries=boundaries, value=str(the_ids), num_bytes=num_bytes)


@given(ids, ids)
def test_the_common_prefix_is_the_longest(a, b):
    length = common_length(a, b)

    assert a[:length] == b[:length]
    assert length in (len(a), len(b)) or a[length] != b[length]


@given(ids, ids.filter(bool), st.lists(st.integers(0, 12)))
def test_what_is_usable_is_shared_cut_at_a_boundary_and_leaves_one_to_compute(a, b, boundaries):
    free, bound = usable_length(a, b, None), usable_length(a, b, boundaries)

    assert a[:free] == b[:free]
    assert bound <= free < len(b)
    assert bound == 0 or bound in boundaries


def test_the_least_recently_used_prefix_goes_first():
    prefixes = KeptPrefixes(25)
    first, second, third = kept(1), kept(2), kept(3)
    prefixes.put(first)
    prefixes.put(second)
    prefixes.touch(first)

    prefixes.put(third)

    assert prefixes.longest((1, 9))[1] is first
    assert prefixes.longest((2, 9)) == (0, None)
    assert prefixes.num_bytes == 20


def test_a_prefix_that_had_to_go_while_it_was_in_use_stays_away():
    prefixes = KeptPrefixes(10)
    first, second = kept(1), kept(2)
    prefixes.put(first)
    prefixes.put(second)

    prefixes.touch(first)

    assert prefixes.longest((2, 9))[1] is second
    assert len(prefixes) == 1


def test_a_longer_prefix_replaces_the_one_that_it_contains():
    prefixes = KeptPrefixes(100)
    prefixes.put(kept(1, 2))

    prefixes.put(kept(1, 2, 3))

    assert len(prefixes) == 1
    assert prefixes.holds((1, 2))
    assert prefixes.longest((1, 2, 3, 4))[0] == 3


def test_a_shorter_prefix_stays_where_the_longer_cannot_be_cut():
    prefixes = KeptPrefixes(100)
    prefixes.put(kept(1, 2, boundaries=(2,)))

    prefixes.put(kept(1, 2, 3, boundaries=(3,)))

    assert prefixes.longest((1, 2, 9))[0] == 2


def test_one_over_the_budget_is_not_kept():
    prefixes = KeptPrefixes(5)

    prefixes.put(kept(1))

    assert len(prefixes) == 0
