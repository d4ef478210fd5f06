"""What every workflow file must hold, read from the file alone."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from tests.workflows.files import FILES, GOLDEN, NAMES, read
from tools.comfyui import ROOT
from tools.workflow_graph import CORE, GAP, LINE, NOTES, PACK, TITLE, Group, Link, Node, Workflow, build, to_prompt
from tools.workflows import WORKFLOWS, version

MAX_THUMBNAIL_BYTES = 60_000


@pytest.fixture(params=FILES, ids=NAMES)
def path(request):
    return request.param


@pytest.fixture
def workflow(path) -> dict[str, Any]:
    return read(path)


def box(node):
    """Left, top, right, bottom with the title above it."""
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - 30, x + width, y + height


def test_every_description_has_its_file_and_every_file_its_description():
    assert [one.name for one in WORKFLOWS] == NAMES


def test_each_is_kept_as_it_was_in_this_version():
    assert sorted(path.stem for path in (GOLDEN / version()).glob("*.json")) == NAMES


def test_every_node_of_the_pack_is_in_a_workflow():
    nodes = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))

    used = {node["type"] for path in FILES for node in read(path)["nodes"]}

    assert set(nodes) - used == set()


def test_links_ids_and_sockets_agree(workflow):
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}

    assert len(nodes) == len(workflow["nodes"]) and workflow["last_node_id"] == max(nodes)
    assert len(links) == len(workflow["links"]) and workflow["last_link_id"] == max(links, default=0)
    for number, source, slot, target, place, kind in links.values():
        assert number in nodes[source]["outputs"][slot]["links"]
        assert nodes[source]["outputs"][slot]["type"] == kind
        assert nodes[target]["inputs"][place]["link"] == number
    wired = [socket["link"] for node in nodes.values() for socket in node["inputs"] if socket["link"]]
    given = [number for node in nodes.values() for output in node["outputs"] for number in output["links"]]
    assert sorted(wired) == sorted(given) == sorted(links)


def test_no_two_nodes_and_no_two_groups_overlap_and_each_node_is_in_one_group(workflow):
    boxes = {node["id"]: box(node) for node in workflow["nodes"]}
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, other)
    frames = [group["bounding"] for group in workflow["groups"]]
    for a, b in itertools.combinations(frames, 2):
        assert a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0]
    for node in workflow["nodes"]:
        left, top, right, bottom = boxes[node["id"]]
        around = [
            x <= left and y <= top and right <= x + width and bottom <= y + height for x, y, width, height in frames
        ]
        assert sum(around) == (0 if node["type"] in NOTES else 1), node["type"]


def test_groups_are_named_and_a_note_says_what_it_needs(workflow):
    notes = [node for node in workflow["nodes"] if node["type"] in NOTES]

    assert workflow["groups"] and all(group["title"].strip() for group in workflow["groups"])
    assert len(notes) == 1 and notes[0]["title"]
    assert re.search(r"models/|Needs |Start vLLM", notes[0]["widgets_values"][0])


def test_every_node_is_stamped_with_its_pack_and_version(workflow):
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        properties = node["properties"]
        is_ours = node["type"].startswith("Resident")
        assert properties["cnr_id"] == (PACK if is_ours else CORE)
        assert properties["Node name for S&R"] == node["type"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", properties["ver"])
        assert not is_ours or properties["ver"] == version()


def test_diffusion_is_done_by_core_nodes_alone(workflow):
    packs = {node["properties"].get("cnr_id") for node in workflow["nodes"]} - {None}

    assert packs <= {PACK, CORE}


def test_there_is_a_small_thumbnail(path):
    picture = path.with_suffix(".jpg")

    assert picture.read_bytes()[:3] == b"\xff\xd8\xff"
    assert picture.stat().st_size < MAX_THUMBNAIL_BYTES


INFO = {
    "Seeded": {
        "python_module": "custom_nodes.resident-llm",
        "input": {
            "required": {
                "seed": ["INT", {"default": 0, "control_after_generate": True}],
                "text": ["STRING", {"forceInput": True}],
                "mode": [["a", "b"]],
            },
            "optional": {"note": ["STRING", {"multiline": True}]},
        },
        "input_order": {"required": ["seed", "text", "mode"], "optional": ["note"]},
        "output": ["STRING", "INT"],
        "output_name": ["out", "count"],
        "output_is_list": [False, True],
    }
}


def seeded(**values):
    return build(Workflow("x", [Group("g", [[Node("n", "Seeded", values)]])]), INFO, "1.2.3")


def test_a_value_stands_behind_each_seed_and_defaults_fill_the_rest():
    first = Node("a", "Seeded", {"text": Link("a", "out"), "seed": 5})
    second = Node("b", "Seeded", {"text": Link("a", "count"), "note": Link("a", "out"), "mode": "b"})

    made = build(Workflow("x", [Group("g", [[first], [second]])]), INFO, "1.2.3")

    assert [node["widgets_values"] for node in made["nodes"]] == [[5, "fixed", "a", ""], [0, "fixed", "b", ""]]
    assert to_prompt(made, INFO) == {
        "1": {"class_type": "Seeded", "inputs": {"seed": 5, "text": ["1", 0], "mode": "a", "note": ""}},
        "2": {"class_type": "Seeded", "inputs": {"seed": 0, "text": ["1", 1], "mode": "b", "note": ["1", 0]}},
    }


@pytest.mark.parametrize(
    ("values", "is_shown"), [({}, False), ({"rare": 1}, False), ({"rare": 2}, True), ({"often": "b"}, False)]
)
def test_a_setting_that_is_folded_away_takes_no_height_until_it_is_used_and_room_is_kept_for_it(values, is_shown):
    widgets = {"often": [["a", "b"]], "rare": ["INT", {"default": 1, "advanced": True}]}
    described = {**INFO["Seeded"], "input": {"required": widgets}, "input_order": {"required": list(widgets)}}
    nodes = [[Node("n", "Folding", values), Node("m", "Folding", {})]]

    first, second = build(Workflow("x", [Group("g", nodes)]), {"Folding": described}, "1.2.3")["nodes"]

    assert (first["size"][1] - second["size"][1] == LINE) == is_shown
    assert second["pos"][1] - first["pos"][1] == second["size"][1] + LINE + TITLE + GAP
    assert first["widgets_values"] == [values.get("often", "a"), values.get("rare", 1)]


@pytest.mark.parametrize("values", [{}, {"text": Link("n", "nothing")}, {"text": Link("n", "out"), "sed": 5}])
def test_a_description_with_a_slip_is_refused(values):
    with pytest.raises(Exception, match=r"nothing is wired into text|has no"):
        seeded(**values)
