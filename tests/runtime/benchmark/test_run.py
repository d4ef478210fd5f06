import json
from dataclasses import replace

import pytest

from runtime import ModelSpec, Runtime
from runtime.benchmark.plan import Plan
from runtime.benchmark.plot import plot_of
from runtime.benchmark.rows import faults_of, notes_of
from runtime.benchmark.run import Progress, RowDone, run
from runtime.benchmark.table import compare, table_of
from runtime.errors import InvalidValue

LONG_REPLY = "word " * 200


def spec(name="script", **options):
    options = {"reply": LONG_REPLY, **options}
    return ModelSpec(model=name, engine="scripted", options=tuple(options.items()))


def rows_of(plan):
    return [event.row for event in run(plan, Runtime()) if isinstance(event, RowDone)]


def plan(*specs, **fields):
    return Plan(specs=specs or (spec(),), **{"contexts": (128,), "output_tokens": 16, "repeats": 2, **fields})


def test_a_row_holds_exactly_the_tokens_that_the_plan_asks_for():
    [row] = rows_of(plan(contexts=(200,), output_tokens=24))

    assert (row["num_prompt_tokens"], row["output_tokens"], row["repeats"]) == (200, 24, 2)
    assert row["errors"] == []
    assert row["decode_tokens_per_s_min"] <= row["decode_tokens_per_s"] <= row["decode_tokens_per_s_max"]
    assert json.loads(json.dumps(row)) == row


def test_two_models_take_turns_so_that_their_ratio_is_paired():
    order = [e.what for e in run(plan(spec("a"), spec("b"), warmup=1), Runtime()) if isinstance(e, Progress)]

    assert [what[0] for what in order if what != "done"] == list("ababab")


def test_each_length_and_batch_size_gives_a_row():
    rows = rows_of(plan(contexts=(64, 128), batch_sizes=(1, 3)))

    assert [(row["batch"], row["num_prompt_tokens"]) for row in rows] == [(1, 64), (1, 128), (3, 64), (3, 128)]


def test_a_model_that_fails_gives_a_row_with_its_sentence_and_the_other_goes_on():
    broken, whole = rows_of(plan(spec("bad", fail_at=5), spec("good")))

    assert broken["errors"] == ["step 5 failed by script."]
    assert broken["decode_tokens_per_s"] is None
    assert whole["errors"] == []


def test_too_few_tokens_do_not_count():
    [row] = rows_of(plan(spec(reply="short")))

    assert "16 were asked for" in row["errors"][0]


def test_rows_that_came_before_a_close_are_kept():
    benchmarking = run(plan(contexts=(64, 128)), Runtime())
    rows = []
    for event in benchmarking:
        if isinstance(event, RowDone):
            rows.append(event.row)
            break
    benchmarking.close()

    assert [row["num_prompt_tokens"] for row in rows] == [64]


def test_a_rate_above_the_ceiling_is_an_error_of_measurement_unless_tokens_were_drafted():
    [row] = rows_of(plan())
    above = {**row, "device": "cuda:0", "percent_of_ceiling": 140.0}

    assert "error of measurement" in faults_of(above)[0]
    assert faults_of({**above, "num_drafted_tokens": 12}) == []


def test_on_a_processor_whose_cache_may_hold_the_model_it_is_a_note():
    [row] = rows_of(plan())
    above = {**row, "percent_of_ceiling": 140.0}

    assert faults_of(above) == []
    assert "cache may hold the model" in notes_of(above)[0]
    assert notes_of(row) == []


def test_a_clock_that_changed_during_the_runs_is_an_error():
    [row] = rows_of(plan())

    assert faults_of({**row, "sm_clock_mhz_min": 1900, "sm_clock_mhz_max": 1980}) == []
    assert "between 1200 and 1980 MHz" in faults_of({**row, "sm_clock_mhz_min": 1200, "sm_clock_mhz_max": 1980})[0]


def test_the_monitor_sees_each_run_while_it_goes_on_and_keeps_none():
    runtime = Runtime()
    seen = [one.phase for _ in run(plan(), runtime) for one in runtime.journal.live()]

    assert {"prefill", "decode"} <= set(seen)
    assert runtime.journal.last_runs() == runtime.journal.live() == []


def test_what_cannot_be_checked_never_says_passed():
    [row] = rows_of(plan(has_checks=True))

    assert row["checks"]
    assert all(verdict.startswith("not checked: ") for verdict in row["checks"].values())


def test_the_table_and_the_plot_hold_every_row():
    rows = rows_of(plan(spec("a"), spec("b"), contexts=(64, 128)))

    table = table_of(rows)
    image = plot_of(rows)

    assert len(table.splitlines()) == 5
    assert image.size == (960, 540)
    assert len(image.getcolors(100_000)) > 10


def test_comparing_tells_what_changed_beyond_noise():
    [row] = rows_of(plan())
    low, high = (row[f"decode_tokens_per_s_{end}"] for end in ("min", "max"))
    spread = (high - low) / row["decode_tokens_per_s"]
    faster = {**row, "decode_tokens_per_s": row["decode_tokens_per_s"] * (1.5 + 2 * spread)}

    assert compare([row], [row]) == "Nothing changed beyond noise."
    assert "decode_tokens_per_s" in compare([row], [faster])
    assert "only in the second file" in compare([], [row])


@pytest.mark.parametrize("field, value", [("contexts", ()), ("repeats", 0), ("output_tokens", 1), ("specs", ())])
def test_a_plan_without_sense_is_refused(field, value):
    with pytest.raises(ValueError, match="it starts at"):
        replace(plan(), **{field: value})


def test_a_precision_of_the_cache_that_there_is_not_is_refused_before_anything_runs():
    with pytest.raises(InvalidValue, match=r"^The benchmark's kv is 'zzz'; it is one of auto, fp32, "):
        plan(kv_caches=("auto", "zzz"))


@pytest.mark.parametrize("fields", [{"contexts": (256, 99_999_999_999)}, {"batch_sizes": (1, 1_000_000)}])
def test_a_plan_that_would_fill_the_memory_is_refused(fields):
    with pytest.raises(ValueError, match="it ends at"):
        plan(**fields)
