"""Rules for the files of the repository and of the published pack."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pathspec
import pytest
import tomllib

ROOT = Path(__file__).resolve().parent.parent
REGISTRIES = [r"pypi\.org", r"pythonhosted\.org", r"npmjs\.(org|com)", r"deb\.debian\.org", r"download\.pytorch\.org"]
MACHINE_PATH = r"(?<![\w.\-/])/(work|root|opt|tmp)/\w"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]


def published() -> set[str]:
    """The files that go to the registry: the tracked ones less those that .comfyignore names."""
    ignored = pathspec.GitIgnoreSpec.from_lines((ROOT / ".comfyignore").read_text().splitlines())
    names = [path.relative_to(ROOT).as_posix() for path in tracked()]
    return {name for name in names if not ignored.match_file(name)}


def library() -> list[Path]:
    return [ROOT / "__init__.py", *(ROOT / "runtime").rglob("*.py"), *(ROOT / "nodes").rglob("*.py")]


def test_requirements_equal_the_dependencies_of_the_package():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert [line for line in lines if line and not line.startswith("#")] == project["dependencies"]


def test_the_published_pack_holds_the_pack_and_none_of_the_workshop():
    names = published()

    assert {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "runtime/__init__.py"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in library()} <= names
    assert [
        name for name in names if name.startswith(("tests/", "tools/", ".ci/", ".github/")) or "Makefile" in name
    ] == []


@pytest.mark.parametrize("path", library(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_library_code_is_ascii_and_keeps_to_python_3_10(path: Path):
    source = path.read_text(encoding="ascii")

    ast.parse(source, feature_version=(3, 10))


def test_no_file_names_a_place_on_somebodys_machine_or_a_registrys_host():
    pattern = re.compile("|".join([MACHINE_PATH, *REGISTRIES]).encode())
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".png", ".jpg", ".webp", ".gguf", ".safetensors"):
            continue
        found += [f"{path.relative_to(ROOT)}: {hit.group().decode()}" for hit in pattern.finditer(path.read_bytes())]

    assert found == []


def test_no_tracked_file_is_a_link_or_large():
    for path in tracked():
        assert not path.is_symlink(), path
        assert path.stat().st_size < 5_000_000, path
