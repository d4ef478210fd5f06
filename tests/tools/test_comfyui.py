"""Staging a ComfyUI and its process, on a stand-in of a few lines."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from tools import comfyui
from tools.comfyui import ComfyUI, place_model, stage, with_optional_imports
from tools.fault import Fault

ANSWERING = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
print("answering", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that COMFYUI_PATH names, with a main.py that answers."""
    folder = tmp_path / "source"
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").write_text(ANSWERING)
    (folder / "comfy" / "model.py").write_text("import torchvision\n")
    (folder / "models").mkdir()
    (folder / "extra_model_paths.yaml").write_text("a: b\n")
    monkeypatch.setenv("COMFYUI_PATH", str(folder))
    monkeypatch.setattr(comfyui, "BUILD", tmp_path / "build")
    return folder


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import torchvision", ["torchvision"]),
        ("import torchvision.transforms as T", ["T"]),
        ("from torchvision import transforms", ["transforms"]),
        ("from torchvision.ops import nms as suppress, box_iou", ["suppress", "box_iou"]),
        ("import torchaudio.functional", ["torchaudio"]),
    ],
)
def test_an_import_of_an_absent_package_leaves_its_names_as_none(
    line: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for absent in ("torchvision", "torchaudio"):
        monkeypatch.setitem(sys.modules, absent, None)
    (tmp_path / "staged.py").write_text(with_optional_imports(f"{line}\nx = 1\n"))

    seen = runpy.run_path(str(tmp_path / "staged.py"))

    assert {name: seen[name] for name in names} == dict.fromkeys(names)
    assert seen["x"] == 1


@pytest.mark.parametrize("line", ["import torch", "from .torchvision import x", "    import torchvision"])
def test_other_imports_stay_as_they_are(line: str):
    assert with_optional_imports(f"{line}\n") == f"{line}\n"


def test_a_source_is_staged_once_without_its_models_and_again_when_it_changes(source: Path, tmp_path: Path):
    first = stage(source, tmp_path / "build")
    again = stage(source, tmp_path / "build")
    os.utime(source / "main.py", (2e9, 2e9))
    changed = stage(source, tmp_path / "build")

    assert first == again != changed
    assert sorted(path.name for path in first.iterdir()) == ["comfy", "main.py"]
    assert (first / "comfy" / "model.py").read_text().startswith("try:")


def test_a_comfyui_path_without_main_py_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))

    with pytest.raises(Fault, match=r"there is no main\.py in it"):
        comfyui.find_comfyui()


def test_a_server_starts_with_its_folders_settings_and_pack_and_stops(source: Path, tmp_path: Path):
    with ComfyUI(tmp_path / "base", settings={"A.Setting": 1}) as server:
        assert server.get("/system_stats") == {}
        assert server.is_running()

    assert not server.is_running()
    assert (tmp_path / "base/custom_nodes/resident-llm").resolve() == comfyui.ROOT
    assert '"A.Setting": 1' in (tmp_path / "base/user/default/comfy.settings.json").read_text()
    assert "answering" in server.log()


def test_a_server_that_ends_while_starting_is_told_with_the_end_of_its_log(source: Path, tmp_path: Path):
    (source / "main.py").write_text("print('no such flag')\nraise SystemExit(3)\n")

    with pytest.raises(Fault, match=r"ComfyUI ended with 3 while starting:\nno such flag"):
        ComfyUI(tmp_path / "base").start()


def test_a_model_is_placed_as_a_folder_of_its_own_whose_files_take_no_more_disk(tmp_path: Path):
    model = tmp_path / "model"
    (model / "inner").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "inner" / "weights").write_text("w")

    placed = place_model(model, tmp_path / "LLM")
    place_model(model, tmp_path / "LLM")

    assert not placed.is_symlink()
    assert (placed / "inner" / "weights").samefile(model / "inner" / "weights")
    assert (placed / "config.json").samefile(model / "config.json")


def test_a_model_that_was_not_made_is_told_before_anything_starts(tmp_path):
    with pytest.raises(Fault, match=r"no model at .*nothing.*make model"):
        place_model(tmp_path / "nothing", tmp_path / "LLM")
