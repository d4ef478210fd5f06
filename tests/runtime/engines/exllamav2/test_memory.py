"""What the cache keeps, what it holds, and how it is given back."""

import pytest
import torch

from runtime import ModelSpec
from runtime.engines import exllamav2
from runtime.errors import OutOfMemory
from tests.runtime.engines import exllamav2_cpu as cpu
from tests.runtime.engines.exllamav2.asking import LONG, PROMPT, ids_of, run, work


def test_a_prefix_is_reused_across_runs_and_reported(open_engine):
    engine = open_engine()
    [cold] = run(engine, work(engine, LONG)).values()

    [warm] = run(engine, work(engine, [*LONG[:600], 3, 4])).values()

    assert cold[-1].details["num_cached_tokens"] == 0
    assert 512 <= warm[-1].details["num_cached_tokens"] <= 600
    assert ids_of(warm) == cpu.manual([*LONG[:600], 3, 4], 16)


def test_trimming_gives_the_kv_cache_back_and_the_next_request_gets_it_again(open_engine):
    engine = open_engine()
    run(engine, work(engine, LONG))
    before = engine.bytes

    freed = engine.trim(1)

    assert freed == before.kv_cache > 0
    assert engine.bytes.kv_cache == 0
    assert engine.trim(1) == 0
    [steps] = run(engine, work(engine, LONG)).values()
    assert ids_of(steps) == cpu.manual(LONG, 16)
    assert steps[-1].details["num_cached_tokens"] == 0
    assert engine.bytes == before


def test_a_kv_cache_that_finds_no_room_holds_nothing_and_comes_back_whole_later(open_engine, monkeypatch):
    engine = open_engine()
    engine.trim(1)
    cache = engine._parts.cache

    def half():
        cache.key_states[0] = torch.zeros(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(OutOfMemory, match="Allocating the KV cache"):
        patch.setattr(cache, "update_cache_tensors", half)
        run(engine, work(engine, PROMPT))
    left = [one for one in [*cache.key_states, *cache.value_states] if one is not None]
    [steps] = run(engine, work(engine, PROMPT)).values()

    assert left == []
    assert ids_of(steps) == cpu.manual(PROMPT, 16)


@pytest.mark.parametrize("kv_cache", ["fp16", "q8", "q6", "q4"])
def test_kv_bytes_computed_are_kv_bytes_measured(open_engine, folder, kv_cache):
    expected = exllamav2.footprint(ModelSpec(model=str(folder), context_len=1000, kv_cache=kv_cache)).kv_cache

    engine = open_engine(context_len=1000, kv_cache=kv_cache)

    assert engine.bytes.kv_cache == expected == engine.info.details["kv_bytes_computed"]


def test_closing_twice_is_closing_once(open_engine):
    engine = open_engine()

    engine.close()
    engine.close()

    assert engine.bytes.device == 0
    assert engine._parts.model is None
