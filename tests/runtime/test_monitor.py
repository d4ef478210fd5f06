import dataclasses
import json
import math

import pytest

from runtime import Collector, ModelSpec, Prompt, Request, Runtime
from runtime.devices import DeviceState
from runtime.engines import scripted
from runtime.engines.base import DecodeStep
from runtime.journal import Mark
from runtime.monitor import Monitor, model_id
from runtime.timeline import COLOURS, timeline_of

GB = 10**9


class Devices:
    fault = None

    def __init__(self):
        self.num_reads = 0

    def read(self, device):
        self.num_reads += 1
        return DeviceState(device=device, total_bytes=24 * GB, used_bytes=10 * GB)


def spec(name="m", **fields):
    options = (("reply", "word " * 20), ("weights_bytes", 2 * GB))
    return ModelSpec(model=f"a/folder/{name}", engine="scripted", options=options, **fields)


def generate(runtime, spec):
    for _ in runtime.generate(spec, [Request(prompt=Prompt.of("a secret"))]):
        pass


@pytest.fixture
def watched():
    """(runtime, monitor, devices, clock)."""
    now, runtime, devices = [100.0], Runtime(), Devices()
    monitor = Monitor(
        runtime,
        list_devices=lambda: ["cpu"],
        is_kept=lambda spec: spec.model.endswith("kept"),
        devices=devices,
        clock=lambda: now[0],
        wall=lambda: 1e9 + now[0],
    )
    return runtime, monitor, devices, now


def test_the_split_of_a_device_adds_up_to_its_memory(watched):
    runtime, monitor, _, _ = watched
    generate(runtime, spec())

    [device] = monitor.read()["devices"]

    assert device["parts"] == {
        "weights": 2 * GB,
        "kv_cache": 0,
        "other_llm": 0,
        "others": 8 * GB,
        "free": 14 * GB,
    }


def test_many_readers_cost_one_look_and_nobody_looking_costs_none(watched):
    _, monitor, devices, now = watched

    for now[0] in (100.0, 100.1, 100.3, 100.5, 100.6):
        monitor.read()

    assert devices.num_reads == 2


def test_after_the_wall_clock_was_set_back_the_samples_go_on_from_there():
    wall, now = [1000.0], [0.0]
    monitor = Monitor(Runtime(), devices=Devices(), clock=lambda: now[0], wall=lambda: wall[0])

    for now[0], wall[0] in ((0.0, 1000.0), (1.0, 1001.0), (2.0, 401.0), (3.0, 402.0)):
        state = monitor.read()

    assert [one["at"] for one in state["samples"]] == [401.0, 402.0]


def test_what_came_or_went_is_told_at_once(watched):
    runtime, monitor, _, _ = watched
    before = monitor.read()

    generate(runtime, spec())
    loaded = monitor.read()
    runtime.unload()

    assert [len(state["models"]) for state in (before, loaded, monitor.read())] == [0, 1, 0]
    assert loaded["live"] == []


def test_a_reader_is_told_only_what_is_new_to_it(watched):
    runtime, monitor, _, now = watched
    generate(runtime, spec())
    first = monitor.read()
    now[0] += 1
    generate(runtime, spec())

    second = monitor.read(since=first["at"], after=first["runs"][-1]["number"])

    assert [one["at"] for one in second["samples"]] == [second["at"]]
    assert [run["number"] for run in second["runs"]] == [2]
    assert len(monitor.read()["runs"]) == 2


def test_the_state_is_json_without_texts_and_folders(watched):
    runtime, monitor, _, _ = watched
    generate(runtime, spec())

    text = json.dumps(monitor.read())

    assert not any(word in text for word in ("secret", "word", "folder"))


class TellsNoNumbers(scripted.ScriptedEngine):
    """A server whose figures and timings are no numbers."""

    def __init__(self, spec):
        super().__init__(spec)
        capabilities = dataclasses.replace(self.info.capabilities, is_remote=True)
        self.info = dataclasses.replace(self.info, capabilities=capabilities)

    def generate(self, batch):
        for index, step in super().generate(batch):
            if isinstance(step, DecodeStep) and step.finish:
                step = dataclasses.replace(step, details={"server_timings": {"rate": math.inf, "n": [math.nan, 3]}})
            yield index, step

    def observe(self):
        return [{"title": "server", "kv_usage": math.nan, "num_running": 2.0}]


def test_numbers_that_are_none_reach_neither_page_nor_report():
    def load(one):
        yield from ()
        return TellsNoNumbers(one)

    runtime, request = Runtime(load=load), Request(prompt=Prompt.of("hello"))
    collector = Collector(spec(), [request])
    [result] = collector.results(*collector.drain(runtime.generate(spec(), [request])))

    state = Monitor(runtime, devices=Devices()).read()

    assert result.report["server_timings"] == {"rate": None, "n": [None, 3]}
    assert state["models"][0]["servers"] == [{"title": "server", "kv_usage": None, "num_running": 2.0}]
    json.dumps([state, result.report], allow_nan=False)


def test_a_server_that_cannot_be_asked_costs_only_its_own_row(caplog):
    class Mute(TellsNoNumbers):
        def observe(self):
            raise ValueError("no number: 'e'")

    def load(one):
        yield from ()
        return Mute(one)

    runtime = Runtime(load=load)
    generate(runtime, spec())

    state = Monitor(runtime, devices=Devices()).read()

    assert [(one["name"], one["servers"]) for one in state["models"]] == [("m", [])]
    assert "could not be asked" in caplog.text and "no number" in caplog.text


def test_a_model_is_found_by_the_id_that_was_told_and_by_no_other(watched):
    runtime, monitor, _, _ = watched
    generate(runtime, spec("kept"))
    [model] = monitor.read()["models"]

    assert model["is_kept"]
    assert monitor.find(model["id"]) == spec("kept")
    assert monitor.find("a/folder/kept") is None
    assert monitor.find("") is None


def test_an_id_is_of_what_makes_a_model_and_not_of_what_becomes_of_it():
    assert model_id(spec(when_idle="release")) == model_id(spec(host_copy_bytes=5))
    assert model_id(spec(context_len=64)) != model_id(spec())


def test_the_timeline_draws_each_kind_in_its_colour():
    runtime = Runtime()
    generate(runtime, spec())
    runtime.evict()
    marks, runs = runtime.journal.last_marks(), runtime.journal.last_runs()

    image = timeline_of(runs[0].began_at - 0.01, marks[-1].at + 0.01, marks, runs)

    colours = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in image.getcolors(100_000)}
    assert {COLOURS["load"], COLOURS["unload"], COLOURS["run"]} <= colours


def test_a_prompt_without_our_models_gives_an_empty_timeline():
    assert timeline_of(1.0, 1.0, [], []).size == (960, 400)


def test_a_name_of_two_lines_is_drawn_as_one():
    mark = Mark(kind="load", model="a server/of\nmine", at=0.5, seconds=0.1, num_bytes=1, held_bytes=1)

    assert timeline_of(0.0, 1.0, [mark], []).size == (960, 400)
