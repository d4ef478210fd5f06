import ast
import logging

import pytest

from tests.nodes.ledger import CARD, GB, Diffusion, comfy_folder, ledger, pack_module, why_no_host

pytestmark = pytest.mark.skipif(why_no_host() is not None, reason=str(why_no_host()))


class FakeEngine:
    """An engine of given bytes on the fake card, which can give back its KV cache and can be parked."""

    def __init__(self, base, telemetry, weights, kv_cache, can_park):
        self.info = base.EngineInfo(
            engine="fake", model="llm", context_len=64, device="meta", dtype="-", attention="-", kv_cache="-"
        )
        self._bytes = telemetry.Bytes
        self.weights, self.kv_cache, self.host_copy = weights, kv_cache, 0
        self._full = (weights, kv_cache)
        if can_park:
            self.is_in_place = True
            self.park = self._park
            self.unpark = self._unpark
            self.forget = lambda: 0

    @property
    def bytes(self):
        return self._bytes(weights=self.weights, kv_cache=self.kv_cache, host_copy=self.host_copy)

    def encode(self, prompt):
        raise NotImplementedError

    def generate(self, batch):
        raise NotImplementedError

    def trim(self, num_bytes):
        freed, self.kv_cache = self.kv_cache, 0
        return freed

    def close(self):
        self.weights = self.kv_cache = self.host_copy = 0

    def _park(self, max_bytes):
        self.host_copy, self.weights, self.kv_cache = self.weights, 0, 0
        return True

    def _unpark(self):
        self.weights, self.kv_cache = self._full
        yield from ()


class Card:
    """The real ledger, a Runtime under it, and engines that are made as a spec's options say."""

    def __init__(self, memory):
        self.memory = memory
        self.residency = pack_module("nodes.residency")
        self.pack = pack_module("runtime")
        self.base = pack_module("runtime.engines.base")
        self.telemetry = pack_module("runtime.telemetry")
        self.errors = pack_module("runtime.errors")
        self.runtime = self.residency.enter(self.pack.Runtime(load=self._load, footprint=self._footprint))

    def spec(self, weights=12 * GB, kv_cache=2 * GB, can_park=False, device="auto", **fields):
        options = (("weights", weights), ("kv_cache", kv_cache), ("can_park", can_park))
        return self.pack.ModelSpec(model="llm", engine="fake", device=device, options=options, **fields)

    def _footprint(self, spec):
        return self.telemetry.Bytes(weights=spec.option("weights"), kv_cache=spec.option("kv_cache"))

    def _load(self, spec):
        yield from ()
        options = (spec.option(name) for name in ("weights", "kv_cache", "can_park"))
        return FakeEngine(self.base, self.telemetry, *options)

    def use(self, spec):
        with self.runtime.lease(spec):
            return self.held()

    def held(self):
        return sum(resident.bytes.device for resident in self.runtime.residents())

    def entries(self):
        return [loaded.model for loaded in self.memory.current_loaded_models]


@pytest.fixture
def card():
    with ledger() as memory:
        yield Card(memory)


def test_a_used_model_stands_in_the_ledger_once_with_its_true_size(card):
    spec = card.spec()

    card.use(spec)
    card.use(spec)

    [entry] = card.entries()
    assert entry.model_size() == entry.loaded_size() == 14 * GB
    assert entry.current_loaded_device() == CARD
    assert card.runtime.num_loads(spec) == 1


def test_a_diffusion_model_that_fits_beside_leaves_the_model_alone(card):
    card.use(card.spec())

    card.memory.load_models_gpu([Diffusion(2 * GB)])

    assert card.held() == 14 * GB


def test_a_model_asked_for_a_little_gives_its_idle_kv_memory_and_stays(card):
    card.use(card.spec(weights=8 * GB, kv_cache=6 * GB))

    card.memory.load_models_gpu([diffusion := Diffusion(12 * GB)])

    assert diffusion.held == 12 * GB
    assert card.held() == 8 * GB
    assert len(card.entries()) == 2


@pytest.mark.parametrize("can_park", [False, True])
def test_a_model_asked_for_much_leaves_and_the_next_use_brings_it_back(card, can_park):
    spec = card.spec(can_park=can_park, host_copy_bytes=20 * GB)
    card.use(spec)

    card.memory.load_models_gpu([diffusion := Diffusion(18 * GB)])
    held_meanwhile = card.held()
    held_again = card.use(spec)

    assert held_meanwhile == 0
    assert held_again == 14 * GB
    assert diffusion.held == 0
    assert card.runtime.num_loads(spec) == 2
    assert [r.num_returns for r in card.runtime.residents()] == [int(can_park)]


def test_a_host_copy_over_its_budget_is_not_made(card):
    spec = card.spec(can_park=True, host_copy_bytes=11 * GB)
    card.use(spec)

    card.memory.load_models_gpu([Diffusion(18 * GB)])

    assert card.runtime.residents() == []


def test_an_older_host_copy_leaves_for_a_newer_one(card):
    old = card.spec(can_park=True, host_copy_bytes=15 * GB)
    new = card.pack.ModelSpec(model="other", engine="fake", options=old.options, host_copy_bytes=15 * GB)

    for spec in (old, new):
        card.use(spec)
        card.runtime.evict(spec)

    [resident] = card.runtime.residents()
    assert (resident.spec.model, resident.bytes.host_copy) == ("other", 12 * GB)


def test_unload_all_models_takes_it_off_and_a_second_detach_does_nothing(card):
    spec = card.spec(weights=1000, kv_cache=100)
    card.use(spec)
    [entry] = card.entries()

    card.memory.unload_all_models()
    entry.detach()

    assert card.held() == 0
    assert card.entries() == []
    assert entry.loaded_size() == 0


def test_detach_that_is_only_a_new_registration_moves_nothing(card):
    card.use(card.spec())
    [entry] = card.entries()

    entry.detach(unpatch_all=False)

    assert card.held() == 14 * GB


def test_detach_never_raises(card, monkeypatch, caplog):
    card.use(card.spec())
    [entry] = card.entries()
    monkeypatch.setattr(card.runtime, "evict", lambda spec: 1 / 0)
    monkeypatch.setattr(card.runtime, "trim", lambda spec, num_bytes: 1 / 0)

    entry.detach()

    assert entry.partially_unload(CARD, GB) == 0
    assert caplog.text.count("ZeroDivisionError") == 2


@pytest.mark.parametrize(("counted", "level"), [(13.8, "INFO"), (9, "WARNING")])
def test_the_log_says_what_the_device_counts_and_warns_where_it_is_less(card, monkeypatch, caplog, counted, level):
    caplog.set_level(logging.INFO)
    card.use(card.spec())
    free = iter([0, int(counted * GB)])
    monkeypatch.setattr(card.residency, "_free_bytes", lambda device: next(free))

    card.entries()[0].detach()

    [record] = [one for one in caplog.records if one.message.startswith("ComfyUI took")]
    assert record.levelname == level
    assert record.message == f"ComfyUI took llm off meta: 14.0 GB, {counted:.1f} GB by the device's own count"


def test_loading_it_from_outside_brings_nothing_in(card):
    spec = card.spec()
    card.use(spec)
    [entry] = card.entries()
    card.runtime.unload()

    card.memory.load_models_gpu([entry])

    assert card.held() == 0
    assert entry.partially_load(CARD, 1e32) == 0


def test_an_idle_model_is_not_among_those_that_a_sampler_loads_again(card):
    card.use(card.spec())

    assert card.memory.loaded_models(only_currently_used=True) == []
    assert len(card.memory.loaded_models()) == 1


def test_a_model_dropped_from_the_ledger_behind_our_back_is_entered_again(card):
    spec = card.spec()
    card.use(spec)
    card.memory.current_loaded_models.clear()

    card.use(spec)

    assert len(card.entries()) == 1
    assert card.runtime.num_loads(spec) == 1


def test_without_smart_memory_everything_leaves_when_another_model_comes(card, monkeypatch):
    monkeypatch.setattr(card.memory, "DISABLE_SMART_MEMORY", True)
    card.use(card.spec())

    card.memory.load_models_gpu([Diffusion(GB)])

    assert card.held() == 0


def test_our_own_load_evicts_diffusion_models(card):
    card.memory.load_models_gpu([diffusion := Diffusion(18 * GB)])

    card.use(card.spec())

    assert diffusion.held == 0
    assert card.held() == 14 * GB


def test_a_model_that_can_never_fit_is_refused_with_the_numbers_before_loading(card):
    card.memory.load_models_gpu([Diffusion(10 * GB)])

    with pytest.raises(card.errors.OutOfMemory) as caught:
        card.use(card.spec(weights=54 * GB, kv_cache=int(0.6 * GB)))

    assert str(caught.value) == (
        "llm needs 54.0 GB for its weights + 600.0 MB for its KV cache; 24.0 GB can be made free on meta. "
        "Choose 4-bit weights, a smaller context_len, another device, or a server."
    )
    assert card.held() == 0


def test_other_options_replace_the_loaded_copy_and_the_log_says_why(card, caplog):
    caplog.set_level(logging.INFO)
    card.use(card.spec(kv_cache=2 * GB))

    card.use(card.spec(kv_cache=2 * GB, context_len=8192))

    assert card.held() == 14 * GB
    assert "reloading llm because its options changed: context_len: None -> 8192" in caplog.text


def test_a_model_in_use_leaves_when_its_lease_ends(card, monkeypatch):
    import threading

    monkeypatch.setattr(pack_module("runtime.runtime"), "UNLOAD_WAIT_S", 0.01)
    spec = card.spec()
    with card.runtime.lease(spec):
        [entry] = card.entries()
        other = threading.Thread(target=entry.detach)
        other.start()
        other.join()
        held_in_use = card.held()

    assert held_in_use == 14 * GB
    assert card.held() == 0


def test_a_member_outside_the_contract_raises_a_sentence_that_names_it(card):
    card.use(card.spec())

    with pytest.raises(AttributeError, match=r"'teleport'.*Update Resident LLM"):
        _ = card.entries()[0].teleport


def asked_of_patchers(source):
    """Attribute names that the ledger's code reads from the models it is given."""
    tree = ast.parse(source)
    parts = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names = set()
    for part in (parts["LoadedModel"], parts["free_memory"], parts["load_models_gpu"]):
        loop_names = ("x", "m", "model") if part.name == "load_models_gpu" else ()
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner in loop_names or (owner.endswith(".model") and not owner.endswith(".model.model")):
                    names.add(node.attr)
    return names - {"__class__"}


def test_the_entry_has_every_member_that_the_installed_host_asks_for(card):
    card.use(card.spec())
    [entry] = card.entries()

    asked = asked_of_patchers((comfy_folder() / "model_management.py").read_text(encoding="utf-8"))

    assert {"partially_load", "detach", "is_clone", "load_device", "model_patches_models"} <= asked
    assert asked - set(dir(type(entry))) - set(vars(entry)) == set()


def test_the_user_is_told_that_a_model_made_room_and_that_it_is_back(card):
    told = []
    card.runtime.room = card.residency.ComfyRoom(
        card.runtime, lambda kind, values: told.append(card.residency.NOTICES[kind].format(**values))
    )
    spec = card.spec()
    card.use(spec)
    told_at_first = list(told)

    card.memory.load_models_gpu([Diffusion(18 * GB)])
    card.use(spec)
    card.use(spec)

    assert told_at_first == []
    assert told == [f"llm made room on {CARD}: 12.0 GB. It returns when needed.", f"llm is back on {CARD}: 14.0 GB."]
