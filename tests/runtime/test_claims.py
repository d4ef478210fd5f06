from collections import Counter

from runtime import claims

EVERY = [one for write_up in claims.write_ups() for one in write_up.claims]


def test_every_claim_is_answered_once_with_a_known_verdict():
    assert max(Counter(one.id for one in EVERY).values()) == 1
    assert all(one.claim and one.truth and one.ours and one.verdict in claims.VERDICTS for one in EVERY)


def test_the_ids_run_without_a_gap():
    for write_up in claims.write_ups():
        first = int(write_up.claims[0].id.partition("-")[2])
        assert [one.id for one in write_up.claims] == [
            f"{write_up.id}-{number:02}" for number in range(first, first + len(write_up.claims))
        ]


def test_no_words_find_all_and_an_id_finds_only_itself():
    assert claims.find("") == EVERY
    assert [one.id for one in claims.find("S04-06")] == ["S04-06"]
