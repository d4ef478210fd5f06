"""Rules for the files of the repository and of the published pack."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from runtime.engines import ENGINES
from tools.comfy_test import published

ROOT = Path(__file__).resolve().parent.parent
REGISTRIES = [r"pypi\.org", r"pythonhosted\.org", r"npmjs\.(org|com)", r"deb\.debian\.org", r"download\.pytorch\.org"]
MACHINE_PATH = r"(?<![\w.\-/])/(work|root|opt|tmp)/\w"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]


def library() -> list[Path]:
    return [ROOT / "__init__.py", *(ROOT / "runtime").rglob("*.py"), *(ROOT / "nodes").rglob("*.py")]


def test_requirements_equal_the_dependencies_of_the_package():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert [line for line in lines if line and not line.startswith("#")] == project["dependencies"]


def test_the_published_pack_holds_the_pack_and_none_of_the_workshop():
    names = set(published())

    assert {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "runtime/__init__.py"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in library()} <= names
    assert [
        name
        for name in names
        if name.startswith(("tests/", "tools/", "bench/", ".ci/", ".github/")) or "Makefile" in name
    ] == []


@pytest.mark.parametrize("path", library(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_library_code_is_ascii_and_keeps_to_python_3_10(path: Path):
    source = path.read_text(encoding="ascii")

    ast.parse(source, feature_version=(3, 10))


def test_no_python_file_breaks_on_the_windows_code_page():
    for path in tracked():
        if path.suffix == ".py":
            path.read_text(encoding="utf-8").encode("cp1252")


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


def test_the_public_checks_cover_every_system_and_python_and_need_no_server():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    matrix = jobs["units"]["strategy"]["matrix"]
    [units] = [step["run"] for step in jobs["units"]["steps"] if "pytest" in step.get("run", "")]

    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "windows", "macos"}
    assert matrix["python"] == ["3.10", "3.11", "3.12", "3.13"]
    for mark in ("server", "browser", "gpu", "vllm"):
        assert f"not {mark}" in units


def test_a_new_version_is_what_publishes_and_its_key_is_a_secret():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    publish = yaml.safe_load(text)

    assert publish[True]["push"]["paths"] == ["pyproject.toml"]
    [step] = [step for step in publish["jobs"]["publish"]["steps"] if "publish-node-action" in step["uses"]]
    assert step["with"]["personal_access_token"].startswith("${{ secrets.")


def test_the_registrys_fields_are_as_it_wants_them():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    name, comfy = project["project"]["name"], project["tool"]["comfy"]

    assert re.fullmatch(r"[a-z][a-z0-9-]{0,98}", name) and "comfyui" not in name
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"])
    assert all(re.fullmatch(r"[<>=!~]*\d+\.\d+\.\d+", part) for part in comfy["requires-comfyui"].split(","))
    assert comfy["PublisherId"] and comfy["DisplayName"]
    assert f"## {project['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_only_the_publisher_can_fill_in_is_listed_and_the_icon_is_as_the_registry_wants_it():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Before the first release")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    there = {**project["project"].get("urls", {}), **project["tool"]["comfy"]}

    for field in ("Repository", "Icon", "Banner"):
        assert field in there or f"`{field}`" in section, field
    assert "`PublisherId`" in section and "`REGISTRY_ACCESS_TOKEN`" in section
    header = (ROOT / "docs" / "img" / "icon.png").read_bytes()[:24]
    width, height = int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and width == height <= 400


def test_every_engines_extra_names_an_engine_that_there_is():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert set(extras) - {"monitor"} == {row.name for row in ENGINES} - {"scripted"}
