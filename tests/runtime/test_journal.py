import json

import pytest

from runtime import Message, ModelSpec, Prompt, Request, Runtime
from runtime.events import Finish, Finished, LoadProgress, PrefillProgress, Started, TextDelta
from runtime.journal import NUM_RUNS, Journal, Run
from runtime.telemetry import Timings


def spec(name="m", **options):
    options = {"reply": "some words", **options}
    return ModelSpec(model=f"folder/{name}", engine="scripted", options=tuple(options.items()))


def ask(text="a secret"):
    return Request(prompt=Prompt(messages=(Message.of("user", text),), stop_strings=("hidden",)))


def drain(events):
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value


@pytest.fixture
def followed():
    """(journal, clock list, start a stream of the given (moment, event) pairs)."""
    now = [0.0]
    journal = Journal(clock=lambda: now[0])

    def start(script, num_items=1):
        def events():
            for at, event in script:
                now[0] = at
                yield event

        return journal.follow(spec(), num_items, events(), lambda answer, ends: [{"n": len(ends)}])

    return journal, now, start


def delta(num_tokens, index=0):
    return TextDelta(index=index, text="x", channel="answer", num_tokens=num_tokens)


def finished(num_tokens, index=0):
    return Finished(
        index=index,
        finish=Finish(reason="stop", by="token"),
        raw_text="",
        is_cut_thinking=False,
        num_prompt_tokens=20,
        num_cached_tokens=5,
        num_output_tokens=num_tokens,
        timings=Timings(0.0),
    )


def test_a_live_run_tells_its_phase_its_progress_and_its_rate(followed):
    journal, _, start = followed
    events = start(
        [
            (1, LoadProgress(done=43, total=100)),
            (2, Started(index=0, num_prompt_tokens=20, max_tokens=50)),
            (2.5, PrefillProgress(index=0, num_done=10, num_total=20, num_cached=5)),
            (3, delta(1)),
            (4, delta(11)),
        ]
    )
    seen = []

    for _ in range(5):
        next(events)
        [run] = journal.live()
        seen.append((run.phase, run.progress, run.tokens_per_s()))

    assert seen == [
        ("load", (43, 100), None),
        ("prefill", (0, 20), None),
        ("prefill", (10, 20), None),
        ("decode", (1, 50), None),
        ("decode", (11, 50), 10.0),
    ]
    assert (run.ttft_s, run.num_tokens, run.num_cached_tokens) == (1, 11, 5)


def test_a_run_that_stalls_comes_down_to_no_tokens_a_second(followed):
    journal, now, start = followed
    events = start([(0, Started(index=0, num_prompt_tokens=1, max_tokens=9)), (1, delta(1)), (2, delta(5))])
    for _ in range(3):
        next(events)
    [run] = journal.live()

    rates = []
    for now[0] in (2, 2.5, 9):
        rates.append(run.tokens_per_s())

    assert rates == [4.0, pytest.approx(4 / 1.5), 0.0]


def test_a_closed_stream_is_an_interrupted_run_and_lives_no_more(followed):
    journal, now, start = followed
    events = start([(1, Started(index=0, num_prompt_tokens=1, max_tokens=9)), (2, delta(3))])
    next(events)
    next(events)
    now[0] = 5.0

    events.close()

    [run] = journal.last_runs()
    assert (run.outcome, run.num_tokens, run.ended_at, run.reports) == ("interrupted", 3, 5.0, ())
    assert journal.live() == []


def test_items_of_a_batch_add_up(followed):
    journal, _, start = followed
    script = [(0, Started(index=i, num_prompt_tokens=20, max_tokens=10)) for i in (0, 1)]
    drain(start([*script, (1, delta(4)), (1, delta(6, 1)), (2, finished(7)), (2, finished(10, 1))], num_items=2))

    [run] = journal.last_runs()
    usage = journal.usage[spec()]
    assert (run.num_tokens, run.reports) == (17, ({"n": 2},))
    assert (usage.num_requests, usage.num_prompt_tokens, usage.num_cached_tokens) == (2, 40, 10)


def test_loads_evictions_and_unloads_are_marked_with_what_is_held_after_them():
    runtime, first, second = Runtime(), spec("a"), spec("b")
    drain(runtime.generate(first, [ask()]))
    drain(runtime.generate(second, [ask()]))

    runtime.evict(first)
    runtime.unload(second)

    marks = [(mark.kind, mark.model, mark.num_bytes, mark.held_bytes) for mark in runtime.journal.last_marks()]
    assert marks == [
        ("load", "folder/a", 1000, 1000),
        ("load", "folder/b", 1000, 2000),
        ("unload", "folder/a", 1000, 1000),
        ("unload", "folder/b", 1000, 0),
    ]


def test_what_is_kept_of_a_run_holds_no_text_and_no_folder():
    runtime = Runtime()
    drain(runtime.generate(spec(reply="an answer hidden here"), [ask()]))

    [run] = runtime.journal.last_runs()

    text = json.dumps(run.reports)
    assert run.reports[0]["finish"] == {"reason": "stop", "by": "string"}
    assert not any(word in text for word in ("secret", "answer", "hidden", "folder"))


def test_a_run_that_is_over_keeps_neither_its_answers_nor_a_mark_of_each_token():
    runtime = Runtime()
    drain(runtime.generate(spec(reply="an answer " * 100), [ask()]))

    [run] = runtime.journal.last_runs()

    kept = repr({name: value for name, value in vars(run).items() if name != "spec"})
    assert "an answer" not in kept
    assert len(kept) < 3000


def test_a_reader_that_comes_between_the_last_of_the_prefill_and_the_first_token_gets_no_rate(followed):
    journal, _, start = followed
    events = start([(1, Started(index=0, num_prompt_tokens=1, max_tokens=9)), (2, delta(1))])
    next(events)
    [run] = journal.live()
    run._lock = BehindRelease(run._lock, lambda: next(events))

    rate = run.tokens_per_s()

    assert (rate, run.phase) == (None, "decode")


class BehindRelease:
    """A lock behind whose first release something else happens at once, as in another thread."""

    def __init__(self, lock, act):
        self._lock, self._act = lock, act

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)
        act, self._act = self._act, lambda: None
        act()


def test_a_model_that_cannot_be_loaded_gives_a_failed_run_with_the_kind_of_error():
    runtime = Runtime()
    events = runtime.generate(ModelSpec(model="nowhere", engine="no-such-engine"), [ask()])

    with pytest.raises(Exception, match="no engine"):
        drain(events)

    [run] = runtime.journal.last_runs()
    assert (run.outcome, run.error) == ("failed", "EngineUnavailable")


def test_only_the_last_runs_are_kept():
    runtime = Runtime()
    for _ in range(NUM_RUNS + 3):
        drain(runtime.generate(spec(), [ask()]))

    assert [run.number for run in runtime.journal.last_runs()] == list(range(4, NUM_RUNS + 4))


def test_a_token_costs_the_same_in_a_batch_of_thousands(num_calls):
    def cost(num_items):
        run = Run(1, spec(), num_items, lambda: 0.0)
        for index in range(num_items):
            run.take(Started(index=index, num_prompt_tokens=3, max_tokens=9))
            run.take(delta(1, index))
        return num_calls(lambda: run.take(delta(2)))

    assert cost(3000) == cost(3)
