from dataclasses import replace

import pytest

from tests.tiny import make_model


@pytest.fixture
def load(pack):
    return pack("nodes.load")


def test_auto_and_the_engine_that_it_means_are_one_recipe(load, pack, tmp_path):
    folder = str(make_model(tmp_path))
    spec = pack("runtime").ModelSpec(model=folder)

    settled = load.settled(spec)

    assert settled == load.settled(replace(spec, engine="transformers"))
    assert settled.engine == "transformers"


def test_a_model_that_nothing_can_run_is_left_for_the_generator_to_tell(load, pack, tmp_path):
    spec = pack("runtime").ModelSpec(model=str(tmp_path))

    assert load.settled(spec) == spec
