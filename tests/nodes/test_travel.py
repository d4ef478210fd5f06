"""Answers in the workflow of an image."""

import copy

import pytest


@pytest.fixture
def travel(pack):
    return pack("nodes.travel")


def workflow():
    inner = {"id": "sub", "nodes": [{"id": 5, "type": "ResidentGenerate", "properties": {"kept": 1}}]}
    nodes = [{"id": 4, "type": "ResidentGenerate"}, {"id": 12, "type": "sub"}, {"id": 13, "type": "sub"}]
    return {"id": "w", "nodes": nodes, "definitions": {"subgraphs": [inner]}}


def prompt(seed=1, user="a cat"):
    return {
        "2": {"class_type": "ResidentPrompt", "inputs": {"user": user}},
        "4": {"class_type": "ResidentGenerate", "inputs": {"prompt": ["2", 0], "seed": seed}},
        "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x"}},
    }


def text_of(travel, graph, execution_id):
    return travel.node_at(graph, execution_id).get("properties", {}).get(travel.PROPERTY)


def test_an_answer_is_written_to_its_node(travel):
    graph = workflow()

    travel.write(graph, "4", ["a lighthouse", "a boat"])

    assert text_of(travel, graph, "4") == {"4": ["a lighthouse", "a boat"]}


def test_two_places_of_one_subgraph_keep_their_own_answers(travel):
    graph = workflow()

    travel.write(graph, "12:5", ["first"])
    travel.write(graph, "13:5", ["second"])

    inner = graph["definitions"]["subgraphs"][0]["nodes"][0]
    assert inner["properties"] == {"kept": 1, travel.PROPERTY: {"12:5": ["first"], "13:5": ["second"]}}


@pytest.mark.parametrize(
    "graph", [None, [], {}, {"nodes": None}, {"nodes": [3, {"id": 4, "properties": []}]}, {"definitions": 1}]
)
@pytest.mark.parametrize("execution_id", ["4", "12:5", "", "4:4:4"])
def test_a_workflow_without_the_node_is_left_as_it_is(travel, graph, execution_id):
    before = copy.deepcopy(graph)

    travel.write(graph, execution_id, ["text"])
    travel.clear(graph)

    assert graph == before


def test_a_node_that_will_not_run_again_has_its_answer_filled_in(travel):
    answers, graph = travel.Answers(), workflow()
    answers.keep(prompt(), "4", ["a lighthouse"])
    again = prompt()
    again["9"]["inputs"]["filename_prefix"] = "another"

    answers.fill(again, graph, "ResidentGenerate")

    assert text_of(travel, graph, "4") == {"4": ["a lighthouse"]}


def test_a_number_that_comfyui_has_given_its_type_is_the_same_number(travel):
    assert travel.signature(prompt(seed=-1), "4") == travel.signature(prompt(seed=-1.0), "4")
    assert travel.signature(prompt(seed=0.5), "4") != travel.signature(prompt(seed=0), "4")


@pytest.mark.parametrize("changed", [prompt(seed=2), prompt(user="a dog"), {}, None])
def test_a_changed_node_has_its_old_answer_taken_out(travel, changed):
    answers, graph = travel.Answers(), workflow()
    answers.keep(prompt(), "4", ["a lighthouse"])
    travel.write(graph, "4", ["an old text"])

    answers.fill(changed, graph, "ResidentGenerate")

    assert text_of(travel, graph, "4") is None


def test_a_cycle_in_a_prompt_is_marked_and_not_followed_for_ever(travel):
    cycle = {"1": {"class_type": "A", "inputs": {"x": ["2", 0]}}, "2": {"class_type": "B", "inputs": {"x": ["1", 0]}}}

    assert travel.signature(cycle, "1") != travel.signature(cycle, "2")


def test_only_so_many_answers_are_kept(travel):
    answers = travel.Answers()
    for seed in range(travel.KEPT_ANSWERS + 1):
        answers.keep(prompt(seed=seed), "4", [str(seed)])

    graph = workflow()
    answers.fill(prompt(seed=0), graph, "ResidentGenerate")
    assert text_of(travel, graph, "4") is None
    answers.fill(prompt(seed=1), graph, "ResidentGenerate")
    assert text_of(travel, graph, "4") == {"4": ["1"]}
