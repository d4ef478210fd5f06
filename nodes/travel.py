"""Text that travels: an answer is written into the workflow that ComfyUI saves in each image.

ComfyUI hands one workflow to all nodes of a prompt, and those that save images embed it. A node that ran writes its
answer there. One that did not run, because nothing had changed, has its answer of the last time put in when the prompt
is queued; that it is the same one is known by all that leads to the node.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PROPERTY = "resident_text"
"""Property of a node: {execution id: answers}. One node of a subgraph has an id for each place the subgraph is in."""

KEPT_ANSWERS = 200


def _parts(workflow: Any) -> Iterator[dict[str, Any]]:
    """The workflow and each of its subgraph definitions."""
    if isinstance(workflow, dict):
        yield workflow
        definitions = workflow.get("definitions")
        subgraphs = definitions.get("subgraphs") if isinstance(definitions, dict) else None
        yield from (one for one in subgraphs or [] if isinstance(one, dict))


def _nodes(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    nodes = part.get("nodes")
    return [node for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []


def node_at(workflow: Any, execution_id: str) -> dict[str, Any] | None:
    """The node of an execution id, which inside subgraphs is "12:5"; None if it is not there."""
    parts = list(_parts(workflow))
    definitions = {str(part.get("id")): part for part in parts[1:]}
    graph, found = (parts[0] if parts else None), None
    for number in str(execution_id).split(":"):
        found = next((node for node in _nodes(graph or {}) if str(node.get("id")) == number), None)
        if found is None:
            return None
        graph = definitions.get(str(found.get("type")))
    return found


def write(workflow: Any, execution_id: str, answers: Sequence[str]) -> None:
    """Put a node's answers into the workflow; does nothing where the node is not in it."""
    node = node_at(workflow, execution_id)
    if node is None:
        return
    properties = node.setdefault("properties", {})
    if isinstance(properties, dict):
        known = properties.get(PROPERTY)
        properties[PROPERTY] = {**(known if isinstance(known, dict) else {}), str(execution_id): list(answers)}


def clear(workflow: Any) -> None:
    """Remove all answers from the workflow."""
    for part in _parts(workflow):
        for node in _nodes(part):
            if isinstance(properties := node.get("properties"), dict):
                properties.pop(PROPERTY, None)


def signature(prompt: Mapping[str, Any], node_id: str) -> str:
    """A mark of a node and all that leads to it: equal ones give the same answer, or none is asked for."""
    marks: dict[str, str] = {}

    def visit(one: str) -> str:
        if one not in marks:
            marks[one] = ""  # a cycle ends here; ComfyUI refuses it later
            node = prompt.get(one) or {}
            inputs = node.get("inputs") or {}
            values = [(name, _linked(value), value) for name, value in sorted(inputs.items())]
            told = [(name, [visit(at[0]), at[1]] if at else _plain(value)) for name, at, value in values]
            text = json.dumps([node.get("class_type"), told], sort_keys=True, default=str)
            marks[one] = hashlib.sha256(text.encode()).hexdigest()
        return marks[one]

    return visit(str(node_id))


def _plain(value: Any) -> Any:
    """The value with 1.0 as 1: ComfyUI turns numbers into the type of their widget between queueing and running."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _linked(value: Any) -> tuple[str, int] | None:
    """(node, slot) of an input that is a link."""
    is_link = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)
    return (value[0], value[1]) if is_link else None


class Answers:
    """The last answers, by what led to them."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}

    def keep(self, prompt: Mapping[str, Any], node_id: str, answers: Sequence[str]) -> None:
        key = signature(prompt, node_id)
        self._known.pop(key, None)
        self._known[key] = list(answers)
        while len(self._known) > KEPT_ANSWERS:
            self._known.pop(next(iter(self._known)))

    def fill(self, prompt: Any, workflow: Any, class_type: str) -> None:
        """Put the known answers of a prompt's nodes into its workflow, and no others."""
        clear(workflow)
        if not isinstance(prompt, dict):
            return
        for node_id, node in prompt.items():
            if isinstance(node, dict) and node.get("class_type") == class_type:
                answers = self._known.get(signature(prompt, node_id))
                if answers is not None:
                    write(workflow, node_id, answers)
