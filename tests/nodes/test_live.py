import itertools
import random

import pytest

from runtime.telemetry import Timings


@pytest.fixture
def events(pack):
    return pack("runtime.events")


@pytest.fixture
def start(pack):
    """A Live with a clock that the test moves, and the messages that it has sent with their times."""

    def make(num_items=1):
        now, sent = [0.0], []
        live = pack("nodes.live").Live(
            lambda message, _: sent.append((now[0], message)), num_items=num_items, clock=lambda: now[0]
        )
        return live, now, sent

    return make


def finished(events, index=0, num_tokens=3):
    return events.Finished(
        index=index,
        finish=events.Finish(reason="stop", by="token"),
        raw_text="",
        is_cut_thinking=False,
        num_prompt_tokens=4,
        num_cached_tokens=0,
        num_output_tokens=num_tokens,
        timings=Timings(0.0, [(1.0, 1), (2.0, 2)]),
    )


def joined(sent, index=0, channel="answer"):
    return "".join(m["delta"] for _, m in sent if (m["index"], m["channel"]) == (index, channel))


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.02, 0.5])
def test_all_text_arrives_in_order_at_most_15_messages_a_second(events, start, gap_s):
    live, now, sent = start()
    words = [f"{i} " for i in range(300)]

    for word, number in zip(words, itertools.count(1)):
        now[0] += gap_s
        live.take(events.TextDelta(index=0, text=word, channel="answer", num_tokens=number))
    live.take(finished(events))

    assert joined(sent) == "".join(words)
    assert [m["seq"] for _, m in sent] == list(range(len(sent)))
    assert len(sent) <= 15 * now[0] + 2
    assert [m["done"] for _, m in sent] == [False] * (len(sent) - 1) + [True]


def test_items_of_a_list_and_their_thinking_keep_apart(events, start):
    live, now, sent = start(num_items=3)
    order = random.Random(1)
    wanted = {(i, c): "" for i in range(3) for c in ("thinking", "answer")}

    for number in range(200):
        index, channel = order.randrange(3), order.choice(["thinking", "answer"])
        wanted[index, channel] += f"{number} "
        now[0] += 0.01
        live.take(events.TextDelta(index=index, text=f"{number} ", channel=channel, num_tokens=number))
    for index in range(3):
        live.take(finished(events, index))

    assert {key: joined(sent, *key) for key in wanted} == wanted
    assert [m["index"] for _, m in sent if m["done"]] == [0, 1, 2]
    assert all(m["num_items"] == 3 for _, m in sent)


def test_a_second_batch_of_one_node_counts_its_items_on(events, start):
    live, _, sent = start(num_items=3)
    live.take(finished(events, 0))

    live.begin_at(1)
    live.take(events.TextDelta(index=1, text="third", channel="answer", num_tokens=1))
    live.take(finished(events, 1))

    assert joined(sent, index=2) == "third"


def test_each_phase_shows_at_once_and_says_how_far_it_is(events, start):
    live, _, sent = start()

    live.take(events.LoadProgress(done=43, total=100))
    live.take(events.Started(index=0, num_prompt_tokens=80, max_tokens=10))
    live.take(events.TextDelta(index=0, text="a", channel="answer", num_tokens=1))

    assert [(m["phase"], m["status"]) for _, m in sent] == [
        ("load", "loading 43 %"),
        ("prefill", "prefill 0 of 80"),
        ("decode", "1 token"),
    ]


def test_a_prefix_from_the_cache_is_told(events, start):
    live, _, _ = start()

    live.take(events.PrefillProgress(index=0, num_done=70, num_total=80, num_cached=64))

    assert live.status == "prefill 70 of 80 (64 cached)"
    assert live.progress == (70, 80)


def test_a_page_that_was_loaded_anew_gets_the_whole_text_once(events, start):
    live, _, sent = start()
    live.take(events.TextDelta(index=0, text="one ", channel="answer", num_tokens=1))
    live.take(events.TextDelta(index=0, text="two ", channel="answer", num_tokens=2))

    [snapshot] = live.snapshots()
    live.take(events.TextDelta(index=0, text="three", channel="answer", num_tokens=3))
    live.take(finished(events))

    assert snapshot["delta"] == "one two "
    assert snapshot["is_snapshot"]
    assert joined([one for one in sent if one[1]["seq"] > snapshot["seq"]]) == "three"


def test_a_failed_item_ends_with_its_sentence(pack, events, start):
    live, _, sent = start()
    error = pack("runtime.errors").GenerationFailed("step 3 failed.")

    live.take(events.Failed(index=0, error=error))

    assert sent[-1][1]["status"] == "step 3 failed."
    assert sent[-1][1]["done"]


def test_a_token_costs_the_same_in_a_batch_of_thousands(start, events, num_calls):
    def cost(num_items):
        live, _, _ = start(num_items)
        for index in range(num_items):
            live.take(events.Started(index=index, num_prompt_tokens=3, max_tokens=9))
            live.take(events.TextDelta(index=index, text="a", channel="answer", num_tokens=1))
        return num_calls(lambda: live.take(events.TextDelta(index=0, text="a", channel="answer", num_tokens=2)))

    assert cost(3000) == cost(3)
