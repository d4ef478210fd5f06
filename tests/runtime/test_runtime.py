import dataclasses
import itertools
import logging
import threading
import traceback
import weakref
from dataclasses import replace

import pytest

from runtime import ModelSpec, Prompt, Request, Runtime
from runtime.engines import scripted
from runtime.engines.base import EngineInfo
from runtime.errors import ModelNotFound, OutOfMemory, RuntimeClosed
from runtime.telemetry import Bytes

UNIT = 1000


class ParkableEngine:
    """Holds UNIT bytes on a device, or on the host while parked; `full` is raised when it must come back."""

    def __init__(self, model="m", attention="-"):
        self.info = EngineInfo(
            engine="fake", model=model, context_len=64, device="cuda:0", dtype="-", attention=attention, kv_cache="-"
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


def parkable(made, room=None, footprint=None, settle=None):
    def load(one):
        yield from ()
        made.append(ParkableEngine(one.model, "sdpa" if one.attention == "auto" else one.attention))
        return made[-1]

    return Runtime(load=load, room=room or Room(), footprint=footprint, settle=settle)


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


def test_an_unload_that_finds_it_in_use_does_not_take_an_eviction_back(monkeypatch):
    monkeypatch.setattr("runtime.runtime.UNLOAD_WAIT_S", 0.01)
    runtime = parkable([])

    with runtime.lease(spec()):
        for act in (runtime.evict, runtime.unload):
            other = threading.Thread(target=act)
            other.start()
            other.join()

    assert runtime.device_bytes(spec()) == 0


def test_an_eviction_that_gives_up_waiting_just_when_the_lease_ends_happens():
    made = []
    runtime = parkable(made)
    use(runtime, spec())
    [slot] = runtime._slots.values()
    slot.lock = FreeJustTooLate()

    freed = runtime.evict()

    assert (freed, runtime.device_bytes(spec()), slot.lock.is_held) == (UNIT + 100, 0, False)


def test_an_eviction_that_comes_while_a_lease_is_given_back_happens(monkeypatch):
    monkeypatch.setattr("runtime.runtime.UNLOAD_WAIT_S", 0.01)
    room = Room()
    runtime = parkable([], room)

    def settle(_):
        other = threading.Thread(target=runtime.evict)
        other.start()
        other.join()

    room.settle = settle
    use(runtime, spec())

    assert runtime.device_bytes(spec()) == 0


class FreeJustTooLate:
    """A lock that nobody gets who waits for it, and that is free right after that."""

    is_held = False

    def acquire(self, blocking=True, timeout=-1):
        self.is_held = not blocking
        return self.is_held

    def release(self):
        self.is_held = False


def test_a_model_on_the_cpu_that_leaves_costs_no_other_its_copy():
    made = []
    runtime = parkable(made)
    use(runtime, spec("gpu", host_copy_bytes=UNIT))
    runtime.evict()
    use(runtime, spec("cpu", host_copy_bytes=UNIT))
    made[1].info = dataclasses.replace(made[1].info, device="cpu")
    made[1].park = lambda max_bytes: False

    runtime.evict(spec("cpu"))

    assert [engine.is_closed for engine in made] == [False, True]


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


class Tensor:
    """Stands for memory; what watches it tells whether it is still held."""


def test_an_error_that_is_kept_holds_nothing_of_a_load_that_failed():
    watched = []

    def fill():
        weights = Tensor()
        watched.append(weakref.ref(weights))
        raise RuntimeError("full")

    def load(one):
        yield from ()
        half = Tensor()
        watched.append(weakref.ref(half))
        try:
            fill()
        except RuntimeError as error:
            raise OutOfMemory("no room") from error

    runtime = Runtime(load=load, room=Room())

    with pytest.raises(OutOfMemory) as raised:
        use(runtime, spec())

    assert [one() for one in watched] == [None, None]
    assert "fill()" in "".join(traceback.format_exception(raised.value))


def test_an_error_that_is_kept_holds_nothing_of_a_generation_that_failed():
    watched = []

    class Failing(scripted.ScriptedEngine):
        def generate(self, batch):
            yield from ()
            activations = Tensor()
            watched.append(weakref.ref(activations))
            raise OutOfMemory("no room")

    def load(one):
        yield from ()
        return Failing(one)

    runtime = Runtime(load=load, room=Room())

    with pytest.raises(OutOfMemory) as raised:
        list(runtime.generate(script(), [ask()]))

    assert raised.value
    assert [one() for one in watched] == [None]


def test_five_users_ten_times_load_once():
    runtime = Runtime()

    for _, text in itertools.product(range(10), "abcde"):
        list(runtime.generate(script(), [ask(text)]))

    assert runtime.num_loads(script()) == 1
    assert [one.bytes for one in runtime.residents()] == [scripted.footprint(script())]


MEANS = {"device": "cuda:0", "dtype": "bf16", "context_len": 4096, "kv_cache": "fp16"}


def settle(one):
    """What a machine makes of "auto"."""
    if one.model == "broken":
        raise ModelNotFound("There is no model.")
    changes = {name: value for name, value in MEANS.items() if getattr(one, name) in ("auto", None)}
    return replace(one, **changes)


@pytest.mark.parametrize("named", [*({name: value} for name, value in MEANS.items()), MEANS])
@pytest.mark.parametrize("is_auto_first", [True, False])
def test_auto_and_what_it_comes_out_as_are_one_model(named, is_auto_first):
    made = []
    runtime = parkable(made, settle=settle)
    first, second = (spec(), spec(**named)) if is_auto_first else (spec(**named), spec())

    assert use(runtime, first) is use(runtime, second) is use(runtime, first)

    assert len(made) == 1 and not made[0].is_closed
    assert runtime.num_loads(first) == runtime.num_loads(second) == runtime.num_loads() == 1
    assert runtime.residents(first) == runtime.residents(second) == runtime.residents()
    assert runtime.device_bytes(first) == runtime.device_bytes(second) == UNIT + 100


@pytest.mark.parametrize("other", [{"dtype": "fp16"}, {"context_len": 512}, {"kv_cache": "q4"}, {"device": "cpu"}])
@pytest.mark.parametrize("is_auto_first", [True, False])
def test_auto_is_not_answered_by_a_model_that_was_loaded_as_something_else(other, is_auto_first):
    made = []
    runtime = parkable(made, settle=settle)
    first, second = (spec(), spec(**other)) if is_auto_first else (spec(**other), spec())

    use(runtime, first)
    use(runtime, second)

    assert [engine.is_closed for engine in made] == [True, False]


def test_the_attention_that_auto_came_out_as_is_the_same_when_it_is_named_and_no_other_is():
    made = []
    runtime = parkable(made, settle=settle)
    use(runtime, spec())

    assert use(runtime, spec(attention="sdpa")) is made[0]
    assert use(runtime, spec(attention="eager")) is not made[0]
    assert use(runtime, spec()) is not made[1]


def test_a_model_is_loaded_by_what_was_asked_and_known_by_what_it_means():
    asked, room = [], Room()

    def load(one):
        yield from ()
        asked.append(one)
        return ParkableEngine(one.model)

    runtime = Runtime(load=load, room=room, settle=settle)
    use(runtime, spec(when_idle="release"))

    assert asked == [spec()]
    [resident] = runtime.residents()
    assert resident.spec == spec(**MEANS)
    assert resident.spec.when_idle == "release"


def test_each_spelling_of_a_model_reaches_it():
    runtime = parkable([], settle=settle)
    use(runtime, spec(**MEANS))
    use(runtime, spec())

    assert runtime.trim(spec(), 1) == 100
    assert runtime.evict(spec()) == UNIT
    assert runtime.residents(spec(**MEANS))[0].is_parked
    assert runtime.unload(spec()) == 0
    assert runtime.residents() == []


def test_what_cannot_be_settled_is_told_by_loading_it():
    with pytest.raises(OutOfMemory):
        use(parkable([], Room(free=1), lambda one: Bytes(weights=UNIT), settle), spec("broken"))


def test_settling_reads_the_files_once_for_a_run_and_not_at_all_for_a_model_that_stands():
    asked = []
    runtime = Runtime(settle=lambda one: asked.append(one) or one)

    for _ in range(3):
        list(runtime.generate(script(), [ask()]))

    assert asked == [script()]
