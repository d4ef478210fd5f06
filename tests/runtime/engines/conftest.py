"""Tiny models, made once per session, for the tests of engines."""

import pytest

from tests.tiny import can_make, make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny model by kind; skips what the installed transformers does not know."""
    transformers = pytest.importorskip("transformers")
    made = {}

    def of(kind):
        if not can_make(kind):
            pytest.skip(f"transformers {transformers.__version__} has no {kind}")
        if kind not in made:
            made[kind] = make_model(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of
