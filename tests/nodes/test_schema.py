"""Schemas on hosts that know fewer fields."""

import dataclasses

import pytest

NEWER = ["search_aliases", "not_idempotent", "is_input_list"]


def older(real, missing):
    """The host's Schema without some fields: a dataclass that refuses them, as an older host's does."""
    fields = [
        (one.name, one.type, dataclasses.field(default=None))
        for one in dataclasses.fields(real)
        if one.name not in missing
    ]
    return dataclasses.make_dataclass("Schema", fields)


@pytest.fixture
def full():
    names = ["node_id", "display_name", "category", "description", "inputs", "outputs", *NEWER]
    return dataclasses.make_dataclass("Schema", [(name, object, dataclasses.field(default=None)) for name in names])


@pytest.mark.parametrize("missing", [[], ["search_aliases"], NEWER])
def test_fields_that_the_host_does_not_know_are_left_out(pack, full, monkeypatch, missing):
    module = pack("nodes.schema")
    host_schema = older(full, missing)
    monkeypatch.setattr(module.io, "Schema", host_schema)
    monkeypatch.setattr(module, "KNOWN", {field.name for field in dataclasses.fields(host_schema)})

    made = module.schema(node_id="X", search_aliases=["x"], not_idempotent=True, is_input_list=True, inputs=[1])

    assert made.node_id == "X" and made.inputs == [1] and made.category == module.CATEGORY
    assert [name for name in NEWER if hasattr(made, name)] == [name for name in NEWER if name not in missing]


def test_every_node_defines_itself_on_a_host_that_knows_only_the_oldest_fields(pack, monkeypatch):
    """The stub host's Schema has no description, no flags and no aliases."""
    module = pack("nodes.schema")

    made = [node.define_schema() for node in pack("nodes").NODES]

    assert {field.name for field in dataclasses.fields(made[0])} == {
        *("node_id", "display_name", "category", "inputs", "outputs"),
    }
    assert {field.name for field in dataclasses.fields(made[0])} == module.KNOWN
    assert len({one.node_id for one in made}) == len(made)


def test_an_advanced_input_keeps_what_it_had_and_needs_no_keyword_of_a_newer_host(pack):
    class Input:
        extra_dict = None

    class Rich(Input):
        extra_dict = {"rawLink": True}  # noqa: RUF012

    advanced = pack("nodes.schema").advanced

    assert advanced(Input()).extra_dict == {"advanced": True}
    assert advanced(Rich()).extra_dict == {"rawLink": True, "advanced": True}
