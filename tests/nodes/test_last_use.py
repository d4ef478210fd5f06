import inspect

import pytest

from tests.nodes.ledger import pack_module


@pytest.fixture
def last_use():
    return pack_module("nodes.last_use")


def load(**inputs):
    return {"class_type": "ResidentLoadLLM", "inputs": {"model": "m", "when_idle": "release", **inputs}}


def generate(llm, prompt="hello"):
    return {"class_type": "ResidentGenerate", "inputs": {"llm": [llm, 0], "prompt": prompt}}


class Models:
    """Records evictions; two models, one of them to be kept."""

    def __init__(self, last_use):
        spec = pack_module("runtime").ModelSpec
        self.left = []
        self.rule = last_use.LastUse(lambda spec: self.left.append(spec.model))
        self.leaving = spec(model="leaving", when_idle="release")
        self.kept = spec(model="kept")

    def used(self, prompt, node, spec=None, prompt_id="p1"):
        self.rule.used(prompt_id, prompt, node, [spec or self.leaving])


@pytest.fixture
def models(last_use):
    return Models(last_use)


def test_it_leaves_after_the_last_of_its_consumers_in_whatever_order_they_run(models):
    prompt = {"1": load(), "2": generate("1"), "3": generate("1"), "4": generate("1")}

    for node in ("4", "2"):
        models.used(prompt, node)
    left_before = list(models.left)
    models.used(prompt, "3")

    assert left_before == []
    assert models.left == ["leaving"]


def test_equal_loaders_are_one_model_and_other_models_do_not_count(models):
    prompt = {
        "1": load(),
        "2": load(when_idle="keep"),
        "3": load(model="other"),
        "4": generate("1"),
        "5": generate("2"),
        "6": generate("3", prompt=["4", 0]),
    }

    models.used(prompt, "4")
    left_before = list(models.left)
    models.used(prompt, "5")

    assert left_before == []
    assert models.left == ["leaving"]


@pytest.mark.parametrize("loader", ["ResidentLoadLLM", "ResidentLoadExLlamaV2", "ResidentConnectServer"])
def test_the_consumers_of_every_loader_are_found(last_use, loader):
    prompt = {"1": {**load(), "class_type": loader}, "2": generate("1"), "3": generate("1")}

    assert last_use.consumers(prompt, "2") == {"2", "3"}


def test_a_model_reaches_its_consumer_through_nodes_that_pass_it_on(last_use):
    prompt = {
        "1": load(),
        "2": {"class_type": "ResidentFree", "inputs": {"value": ["1", 0], "llm": ["1", 0]}},
        "3": generate("2"),
        "4": generate("1"),
    }

    assert last_use.consumers(prompt, "3") == {"3", "4"}


def test_if_a_consumer_was_cached_the_model_leaves_when_the_next_prompt_begins(models):
    prompt = {"1": load(), "2": generate("1"), "3": generate("1")}
    models.used(prompt, "3")

    models.rule.begin("p1")
    left_before = list(models.left)
    models.rule.begin("p2")
    models.rule.begin("p2")

    assert left_before == []
    assert models.left == ["leaving"]


def test_a_model_to_be_kept_stays(models):
    models.used({"1": load(when_idle="keep"), "2": generate("1")}, "2", models.kept)

    models.rule.begin("p2")

    assert models.left == []


def test_a_node_that_is_not_in_the_prompt_lets_its_model_go_at_once(models):
    models.used({"1": load()}, "7.0.1")

    assert models.left == ["leaving"]


def test_every_node_with_a_when_idle_counts_as_a_loader(pack):
    loaders = pack("nodes.last_use").LOADERS

    with_when_idle = [node for node in pack("nodes").NODES if "when_idle" in inspect.signature(node.execute).parameters]

    assert loaders == {node.define_schema().node_id for node in with_when_idle}


def test_a_model_of_exllamav2_stays_for_all_its_consumers(models):
    prompt = {
        "1": {"class_type": "ResidentLoadExLlamaV2", "inputs": {"model": "m", "when_idle": "release"}},
        "2": generate("1"),
        "3": generate("1"),
    }

    models.used(prompt, "2")
    left_before = list(models.left)
    models.used(prompt, "3")

    assert left_before == []
    assert models.left == ["leaving"]
