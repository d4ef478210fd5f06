"""A compact description of a graph -> ComfyUI's saved workflow, and a saved workflow -> the prompt that it queues.

Both read what nodes there are from a server's /object_info, so that widget values stand where the page looks for them:
by position, with one more value behind each seed.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.fault import Fault

Info = Mapping[str, Any]
"""What /object_info says, by node type."""

PACK, CORE, CORE_VERSION = "resident-llm", "comfy-core", "0.3.64"
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
NOTES = ("Note", "MarkdownNote")
AFTER_GENERATE = "fixed"
GAP, PAD, TITLE = 40, 20, 34
"""Pixels between nodes, inside a group's border, and of a title."""
LINE, TEXT_BOX, LIVE_TEXT = 31, 130, 230
"""Pixels that a widget, a text area and our display on a node take."""
DISPLAYS = ("ResidentGenerate", "ResidentReview")
MIN_HEIGHTS = {"SaveImage": 300, "PreviewImage": 300, "PreviewAny": 180}


@dataclass(frozen=True)
class Node:
    """One node. `values` holds its inputs by name: a widget's value, or a Link; `number` is an id that must stay."""

    name: str
    type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    title: str | None = None
    width: int = 360
    height: int | None = None
    models: Sequence[Mapping[str, str]] = ()
    number: int | None = None


@dataclass(frozen=True)
class Link:
    """An output of another node, by its name."""

    node: str
    output: str


@dataclass(frozen=True)
class Group:
    """A named frame around columns of nodes; without a title there is no frame."""

    title: str
    columns: Sequence[Sequence[Node]]
    color: str = "#3f789e"


@dataclass(frozen=True)
class Workflow:
    """One file: its name, and its groups from left to right."""

    name: str
    groups: Sequence[Group]

    def nodes(self) -> Iterator[Node]:
        return (node for group in self.groups for column in group.columns for node in column)


def inputs_of(info: Info, node_type: str) -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    """(name, type, options, is_optional) of each input that the page shows, in its order."""
    described = info[node_type]
    for kind in ("required", "optional"):
        for name in described["input_order"].get(kind, ()):
            spec = described["input"][kind][name]
            options = dict(spec[1]) if len(spec) > 1 else {}
            if isinstance(spec[0], list):
                options["options"] = spec[0]
            yield name, "COMBO" if isinstance(spec[0], list) else str(spec[0]), options, kind == "optional"


def is_widget(input_type: str, options: Mapping[str, Any]) -> bool:
    return input_type in WIDGET_TYPES and not options.get("forceInput")


def widgets_of(info: Info, node_type: str) -> list[tuple[str, dict[str, Any]]]:
    """The widgets in the order of a node's `widgets_values`; the value behind a seed comes as "after NAME"."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name, input_type, options, _ in inputs_of(info, node_type):
        if is_widget(input_type, options):
            found.append((name, options))
            if options.get("control_after_generate"):
                found.append((f"after {name}", {"default": AFTER_GENERATE}))
    return found


def _default(options: Mapping[str, Any]) -> Any:
    """What the page puts into a widget that nobody has touched."""
    if "default" in options:
        return options["default"]
    if "options" in options:
        return options["options"][0]
    return options.get("min", "")


def _is_ours(info: Info, node_type: str) -> bool:
    return node_type in info and str(info[node_type]["python_module"]).startswith("custom_nodes.")


def folded_of(info: Info, node_type: str) -> dict[str, dict[str, Any]]:
    """The options, by name, of the widgets that the page folds away; see web/fold.mjs."""
    if not _is_ours(info, node_type):
        return {}
    return {name: options for name, options in widgets_of(info, node_type) if options.get("advanced")}


def is_unfolded(info: Info, node: Node) -> bool:
    """Whether one of those is in use: then the page shows all of them."""
    folded = folded_of(info, node.type)
    return any(name in folded and value != _default(folded[name]) for name, value in node.values.items())


def size_of(info: Info, node: Node, *, is_folded: bool = False) -> tuple[int, int]:
    """Width and height that hold the node's sockets and widgets in both renderers of the page.

    is_folded: without the settings that the page folds away; the room for them is kept, below the node
    """
    if node.height:
        return node.width, node.height
    if node.type in NOTES:
        lines = sum(1 + len(line) * 8 // (node.width - 40) for line in node.values["text"].splitlines())
        return node.width, 60 + 18 * lines
    sockets = [one for one in inputs_of(info, node.type) if not is_widget(one[1], one[2])]
    height = 24 * max(len(sockets), len(info[node.type]["output"])) + 20
    folded = folded_of(info, node.type)
    for name, options in widgets_of(info, node.type):
        if not (is_folded and name in folded):
            height += TEXT_BOX if options.get("multiline") else LINE
    height += LINE if folded else 0  # the button that folds
    height += LIVE_TEXT if node.type in DISPLAYS else 0
    return node.width, max(height, MIN_HEIGHTS.get(node.type, 0))


def build(workflow: Workflow, info: Info, version: str) -> dict[str, Any]:
    """The workflow as ComfyUI saves it (schema 0.4)."""
    ids = {node.name: node.number or number for number, node in enumerate(workflow.nodes(), 1)}
    links: list[list[Any]] = []
    nodes: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    left = 40
    for group in workflow.groups:
        top = 40 + TITLE
        x, bottom = left + PAD, top
        for column in group.columns:
            y = top + TITLE + PAD
            for node in column:
                nodes.append(_entry(node, ids, links, info, version, [x, y]))
                y += size_of(info, node)[1] + TITLE + GAP
            bottom = max(bottom, y - GAP - TITLE)
            x += max(size_of(info, node)[0] for node in column) + GAP
        if group.title:
            bounds = [left, top - TITLE, x - GAP + PAD - left, bottom + PAD - top + TITLE]
            one = {"id": len(groups) + 1, "title": group.title, "bounding": bounds}
            groups.append({**one, "color": group.color, "font_size": 24, "flags": {}})
        left = x - GAP + PAD + GAP
    _fill_outputs(nodes, links)
    nodes.sort(key=lambda node: int(node["id"]))
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{PACK}/{workflow.name}")),
        "revision": 0,
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {"ds": {"scale": 0.6, "offset": [0, 0]}},
        "version": 0.4,
    }


def _entry(
    node: Node,
    ids: Mapping[str, int],
    links: list[list[Any]],
    info: Info,
    version: str,
    pos: list[int],
) -> dict[str, Any]:
    number = ids[node.name]
    if node.type not in info and node.type not in NOTES:
        raise Fault(f"{node.name}: this ComfyUI has no node {node.type!r}.")
    size = list(size_of(info, node, is_folded=not is_unfolded(info, node)))
    entry: dict[str, Any] = {"id": number, "type": node.type, "pos": pos, "size": size, "flags": {}}
    entry |= {"order": number - 1, "mode": 0, "inputs": [], "outputs": []}
    if node.title:
        entry["title"] = node.title
    if node.type in NOTES:
        look = {"color": "#432", "bgcolor": "#653", "widgets_values": [node.values["text"]]}
        return {**entry, "properties": {}, **look}
    is_ours = _is_ours(info, node.type)
    entry["properties"] = {
        "cnr_id": PACK if is_ours else CORE,
        "ver": version if is_ours else CORE_VERSION,
        "Node name for S&R": node.type,
    }
    if node.models:
        entry["properties"]["models"] = [dict(one) for one in node.models]
    given = dict(node.values)
    for name, input_type, options, is_optional in inputs_of(info, node.type):
        value = given.get(name)
        widget = {"widget": {"name": name}} if is_widget(input_type, options) else {}
        if widget and not isinstance(value, Link):
            continue
        socket: dict[str, Any] = {"name": name, "type": input_type, **widget, "link": None}
        if is_optional and not widget:
            socket["shape"] = 7
        if isinstance(value, Link):
            socket["link"] = len(links) + 1
            links.append([len(links) + 1, ids[value.node], value.output, number, len(entry["inputs"]), input_type])
        elif not is_optional:
            raise Fault(f"{node.name}: nothing is wired into {name}.")
        entry["inputs"].append(socket)
    described = info[node.type]
    for name, output_type, is_list in zip(
        described["output_name"], described["output"], described["output_is_list"], strict=True
    ):
        entry["outputs"].append({"name": name, "type": output_type, **({"shape": 6} if is_list else {}), "links": []})
    values = []
    for name, options in widgets_of(info, node.type):
        value = given.pop(name, None)
        values.append(_default(options) if value is None or isinstance(value, Link) else value)
    entry["widgets_values"] = values
    if unknown := [name for name, value in given.items() if not isinstance(value, Link)]:
        raise Fault(f"{node.name}: {node.type} has no {', '.join(unknown)}.")
    return entry


def _fill_outputs(nodes: Sequence[dict[str, Any]], links: list[list[Any]]) -> None:
    """Turn each link's output name into its slot and type, and note the link at that output."""
    by_id = {node["id"]: node for node in nodes}
    for link in links:
        number, source, output, *_ = link
        names = [one["name"] for one in by_id[source]["outputs"]]
        if output not in names:
            raise Fault(f"{by_id[source]['type']} has no output {output!r}; it has {', '.join(names)}.")
        slot = names.index(output)
        by_id[source]["outputs"][slot]["links"].append(number)
        link[2] = slot
        link[5] = by_id[source]["outputs"][slot]["type"]


def to_prompt(workflow: Mapping[str, Any], info: Info) -> dict[str, Any]:
    """The API form of a saved workflow without subgraphs: what the page queues for it."""
    links = {link[0]: link for link in workflow["links"]}
    prompt: dict[str, Any] = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES or node["mode"] in (2, 4):
            continue
        names = [name for name, _ in widgets_of(info, node["type"])]
        values = dict(zip(names, node["widgets_values"], strict=False))
        inputs = {name: value for name, value in values.items() if not name.startswith("after ")}
        for socket in node["inputs"]:
            if socket["link"] is not None:
                _, source, slot, *_ = links[socket["link"]]
                inputs[socket["name"]] = [str(source), slot]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def dumps(workflow: Mapping[str, Any]) -> str:
    """JSON with pairs of numbers and links on one line each."""
    text = json.dumps(workflow, indent=2, ensure_ascii=False)
    numbers = r"\[\s+((?:-?[\d.]+|\"[A-Z_,*]+\")(?:,\s+(?:-?[\d.]+|\"[A-Z_,*]+\"))*)\s+\]"
    return re.sub(numbers, lambda hit: "[" + re.sub(r",\s+", ", ", hit.group(1)) + "]", text) + "\n"
