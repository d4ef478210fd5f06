import itertools
import logging
import threading

import pytest

from runtime import ModelSpec, Prompt, Request, Runtime
from runtime.engines import scripted
from runtime.engines.base import EngineInfo
from runtime.errors import OutOfMemory, RuntimeClosed
from runtime.telemetry import Bytes

UNIT = 1000


class ParkableEngine:
    """Holds UNIT bytes on a device, or on the host while parked; `full` is raised when it must come back."""

    def __init__(self, model="m"):
        self.info = EngineInfo(
            engine="fake", model=model, context_len=64, device="cuda:0", dtype="-", attention="-", kv_cache="-"
        )
        self.bytes = Bytes(weights=UNIT, kv_cache=100)
        self.is_in_place = True
        self.is_closed = False
        self.full = None

    def encode(self, prompt):
        raise NotImplementedError

    def generate(self, batch):
        raise NotImplementedError

    def trim(self, num_bytes):
        freed, self.bytes = self.bytes.kv_cache, Bytes(weights=UNIT)
        return freed

    def park(self, max_bytes):
        self.bytes = Bytes(host_copy=UNIT)
        return True

    def unpark(self):
        if self.full:
            raise self.full
        yield from ()
        self.bytes = Bytes(weights=UNIT, kv_cache=100)

    def forget(self):
        return 0

    def close(self):
        self.is_closed = True
        self.bytes = Bytes()


class Room:
    """Records what it is asked for; `free` bytes can be made free."""

    def __init__(self, free=10**9):
        self.free, self.reserved, self.settled = free, [], []

    def reserve(self, spec, num_bytes):
        self.reserved.append(num_bytes)

    def settle(self, spec):
        self.settled.append(spec.model)

    def release_cached(self):
        pass

    def can_free(self, spec):
        return "cuda:0", self.free


def spec(model="m", **fields):
    return ModelSpec(model=model, engine="fake", **fields)


def parkable(made, room=None, footprint=None):
    def load(one):
        yield from ()
        made.append(ParkableEngine(one.model))
        return made[-1]

    return Runtime(load=load, room=room or Room(), footprint=footprint)


def use(runtime, one):
    with runtime.lease(one) as engine:
        return engine


def script(**options):
    return ModelSpec(model="script", engine="scripted", options=tuple(options.items()))


def ask(text="hello"):
    return Request(prompt=Prompt.of(text))


def test_an_evicted_model_waits_in_host_memory_and_comes_back_without_a_load():
    made = []
    runtime = parkable(made)
    use(runtime, spec())

    freed = runtime.evict()
    [parked] = runtime.residents()
    use(runtime, spec())
    [back] = runtime.residents()

    assert freed == UNIT + 100
    assert (parked.is_parked, parked.bytes.host_copy, parked.bytes.device) == (True, UNIT, 0)
    assert (back.is_parked, back.num_loads, back.num_returns, len(made)) == (False, 2, 1, 1)


def test_evicting_what_is_parked_does_nothing_and_unloading_it_drops_the_copy():
    made = []
    runtime = parkable(made)
    use(runtime, spec())
    runtime.evict()

    assert runtime.evict() == 0
    assert runtime.unload() == 0
    assert made[0].is_closed
    assert runtime.residents() == []


def test_without_a_host_budget_an_evicted_model_is_unloaded():
    made = []
    runtime = parkable(made)
    use(runtime, spec(host_copy_bytes=0))

    runtime.evict()

    assert made[0].is_closed


def test_the_budget_of_the_last_lease_counts_though_it_is_the_same_model():
    made = []
    runtime = parkable(made)
    use(runtime, spec(host_copy_bytes=0))
    use(runtime, spec(host_copy_bytes=UNIT))

    runtime.evict()

    assert not made[0].is_closed
    assert len(made) == 1


def test_a_model_moved_from_outside_is_loaded_again(caplog):
    made = []
    runtime = parkable(made)
    use(runtime, spec())
    made[0].is_in_place = False

    engine = use(runtime, spec())

    assert engine is made[1]
    assert made[0].is_closed
    assert "moved from outside" in caplog.text


def test_a_return_that_finds_no_memory_leaves_the_model_parked_for_the_next_try():
    made = []
    runtime = parkable(made)
    use(runtime, spec())
    runtime.evict()
    made[0].full = OutOfMemory("full")

    with pytest.raises(OutOfMemory):
        use(runtime, spec())
    [parked] = runtime.residents()
    made[0].full = None
    use(runtime, spec())

    assert parked.is_parked
    assert len(made) == 1


def test_a_return_that_breaks_is_not_tried_again_but_loaded_anew():
    made = []
    runtime = parkable(made)
    use(runtime, spec())
    runtime.evict()
    made[0].full = RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        use(runtime, spec())
    use(runtime, spec())

    assert made[0].is_closed
    assert len(made) == 2


def test_room_is_reserved_before_every_lease_with_the_most_that_the_model_was_seen_to_hold():
    made, room = [], Room()
    runtime = parkable(made, room, footprint=lambda one: Bytes(weights=UNIT, kv_cache=50))

    use(runtime, spec())
    runtime.trim(spec(), 1)
    use(runtime, spec())
    runtime.evict()
    use(runtime, spec())

    assert room.reserved == [UNIT + 50, UNIT + 100, UNIT + 100]
    assert room.settled == ["m"] * 3


def test_what_cannot_fit_is_refused_before_anything_is_loaded():
    made = []
    needed = Bytes(weights=17_700_000_000, kv_cache=600_000_000, scratch=100_000_000)
    runtime = parkable(made, Room(free=11_300_000_000), footprint=lambda one: needed)

    with pytest.raises(OutOfMemory) as caught:
        use(runtime, spec("qwen"))

    assert made == []
    assert str(caught.value) == (
        "qwen needs 17.7 GB for its weights + 600.0 MB for its KV cache + 100.0 MB of scratch; 11.3 GB can be made "
        "free on cuda:0. Choose 4-bit weights, a smaller context_len, another device, or a server."
    )


def test_an_eviction_during_use_happens_when_the_lease_ends(monkeypatch, caplog):
    monkeypatch.setattr("runtime.runtime.UNLOAD_WAIT_S", 0.01)
    made = []
    runtime = parkable(made)

    with runtime.lease(spec()):
        other = threading.Thread(target=runtime.evict)
        other.start()
        other.join()
        held_in_use = runtime.device_bytes(spec())

    assert held_in_use == UNIT + 100
    assert runtime.device_bytes(spec()) == 0
    assert "is in use; it leaves after that" in caplog.text


def test_one_model_with_other_options_replaces_the_first_and_says_why(caplog):
    caplog.set_level(logging.INFO)
    made = []
    runtime = parkable(made)
    use(runtime, spec(kv_cache="fp16"))

    use(runtime, spec(kv_cache="q4"))

    assert [engine.is_closed for engine in made] == [True, False]
    assert "reloading m because its options changed: kv_cache: fp16 -> q4" in caplog.text


def test_a_lease_by_the_thread_that_has_one_is_refused():
    runtime = parkable([])

    with runtime.lease(spec()), pytest.raises(RuntimeError, match="leased twice"):
        use(runtime, spec())


def test_closing_ends_what_another_thread_generates_and_unloads_its_model(monkeypatch):
    monkeypatch.setattr("runtime.runtime.UNLOAD_WAIT_S", 2.0)
    script = {"reply": "word " * 4000, "step_s": 0.001}
    spec = ModelSpec(model="m", engine="scripted", options=tuple(script.items()))
    runtime, has_begun, raised = Runtime(), threading.Event(), []

    def work():
        try:
            for _ in runtime.generate(spec, [Request(prompt=Prompt.of("a cat"))]):
                has_begun.set()
        except RuntimeClosed as error:
            raised.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    has_begun.wait()
    runtime.close()
    worker.join()

    assert len(raised) == 1
    assert runtime.residents() == []
    assert not runtime.journal.live()


def test_a_closed_runtime_lends_nothing_and_closing_twice_is_fine():
    made = []
    runtime = parkable(made)
    use(runtime, spec())

    runtime.close()
    runtime.close()

    assert made[0].is_closed
    with pytest.raises(RuntimeClosed):
        use(runtime, spec())


def test_a_load_that_is_cancelled_leaves_nothing_and_the_next_one_works():
    runtime = Runtime()
    one = script(load_steps=5)

    loading = runtime.leasing(one)
    next(loading)
    loading.close()

    assert runtime.residents() == []
    assert runtime.num_loads() == 0
    assert list(runtime.generate(one, [ask()]))
    assert runtime.num_loads(one) == 1


def test_five_users_ten_times_load_once():
    runtime = Runtime()

    for _, text in itertools.product(range(10), "abcde"):
        list(runtime.generate(script(), [ask(text)]))

    assert runtime.num_loads(script()) == 1
    assert [one.bytes for one in runtime.residents()] == [scripted.footprint(script())]
