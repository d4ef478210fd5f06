import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import frontend
from tools.fault import Fault


def wheel(folder: Path) -> Path:
    path = folder / "comfyui_frontend_package-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(frontend.INSIDE + "index.html", "<html>")
        archive.writestr("comfyui_frontend_package/__init__.py", "")
    return path


def test_the_page_of_a_wheel_is_unpacked_once_and_nothing_else_of_it(tmp_path, monkeypatch):
    calls = []

    def download(command, **_):
        calls.append(command[-1])
        wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(frontend.subprocess, "run", download)

    folder = frontend.frontend("9.9.9", tmp_path)
    again = frontend.frontend("9.9.9", tmp_path)

    assert [path.name for path in folder.iterdir()] == ["index.html"]
    assert again == folder and calls == ["comfyui-frontend-package==9.9.9"]
    assert [path.name for path in tmp_path.iterdir()] == ["frontend-9.9.9"]


def test_a_version_that_pip_cannot_fetch_is_told(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no such version")
    monkeypatch.setattr(frontend.subprocess, "run", lambda *_, **__: failed)

    with pytest.raises(Fault, match=r"could not fetch comfyui-frontend-package 0\.0\.0: no such version"):
        frontend.frontend("0.0.0", tmp_path)
