from runtime import ModelSpec, Runtime
from runtime.benchmark.stage import time_stage


def test_a_stage_is_timed_cold_resident_evicted_and_returned():
    runtime = Runtime()
    spec = ModelSpec(model="script", engine="scripted", options=(("reply", "word " * 50),))
    staging = time_stage(runtime, spec)
    while True:
        try:
            next(staging)
        except StopIteration as end:
            row = end.value
            break

    assert row["evicted_bytes"] == 1000
    assert runtime.num_loads(spec) == 2
    assert all(row[key] >= 0 for key in ("cold_s", "resident_s", "engine_s", "evict_s", "returned_s", "overhead_s"))
