import json
import subprocess
import sys

import pytest

from runtime import ModelSpec
from runtime.engines import choose, footprint, row
from runtime.errors import ModelUnsupported
from runtime.models import transformers_types
from runtime.models.info import read_model
from tests.imports import ROOT
from tests.tiny import make_model

transformers = pytest.importorskip("transformers")


@pytest.fixture
def hybrid(tmp_path):
    """A model of a type that this transformers does not know, as one of a year from now will be."""
    folder = make_model(tmp_path / "hybrid")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen9", "transformers_version": "99.1.0"}))
    return folder


def test_it_is_refused_with_both_versions_before_anything_is_read_but_headers(hybrid):
    with pytest.raises(ModelUnsupported) as caught:
        footprint(ModelSpec(model=str(hybrid), engine="transformers", device="cpu"))

    assert str(caught.value).startswith(
        f"hybrid cannot run with transformers: it is of the type 'qwen9', which is unknown to transformers "
        f"{transformers.__version__}: it needs 99.1.0 or newer. Update with: "
    )
    assert "-m pip install 'transformers>=99.1.0'" in str(caught.value)


def test_auto_does_not_choose_transformers_for_it(hybrid):
    assert "'qwen9', which is unknown" in str(row("transformers").why_not(read_model(str(hybrid))))
    with pytest.raises(ModelUnsupported, match=r"No engine can run .* transformers: it is of the type 'qwen9'"):
        choose(ModelSpec(model=str(hybrid)))


def test_the_types_are_known_without_importing_transformers():
    code = (
        "import sys; from runtime.models.transformers_types import is_known, listed\n"
        "print(is_known('llama'), is_known('qwen9'), len(listed()) > 100, 'transformers' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == "True False True False\n"


def test_the_list_in_the_files_is_the_one_of_the_library():
    assert set(transformers.CONFIG_MAPPING.keys()) <= transformers_types.listed()


def test_a_type_that_another_pack_registered_is_known(monkeypatch):
    config = type("MadeUpConfig", (transformers.PretrainedConfig,), {"model_type": "made_up_here"})
    monkeypatch.setattr(transformers.CONFIG_MAPPING, "_extra_content", {"made_up_here": config})

    assert transformers_types.is_known("made_up_here")


def test_where_transformers_keeps_its_list_elsewhere_nothing_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(transformers_types, "listed", frozenset)

    assert transformers_types.is_known("anything")
