"""Finding a Chromium, or saying how to get one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import chromium
from tools.fault import Fault


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on its PATH but what a test puts into the folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    return tmp_path


def program(folder: Path, name: str, body: str = "exit 0") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_systems_chromium_is_found(bare_machine: Path):
    path = program(bare_machine, "chromium")

    assert chromium.ensure_chromium() == str(path)


def test_a_named_browser_goes_before_the_systems(bare_machine: Path, monkeypatch: pytest.MonkeyPatch):
    program(bare_machine, "chromium")
    monkeypatch.setenv("CHROMIUM", "/somewhere/else")

    assert chromium.ensure_chromium() == "/somewhere/else"


@pytest.mark.parametrize("user", [0, 1000])
def test_a_machine_that_cannot_install_one_gets_a_sentence(user: int, bare_machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if user:
        program(bare_machine, "apt-get")

    with pytest.raises(Fault, match=r"No Chromium was found\. Install it .* `make test-fast` needs none"):
        chromium.ensure_chromium()


def test_root_on_debian_gets_it_installed(bare_machine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    target = bare_machine / "chromium"
    program(bare_machine, "apt-get", f'test "$1" = update || {{ echo > {target} && /bin/chmod +x {target}; }}')

    assert chromium.ensure_chromium() == str(target)


def test_an_install_that_fails_is_told_with_its_reason(bare_machine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    program(bare_machine, "apt-get", "echo 'E: Could not resolve the archive' >&2; exit 100")

    with pytest.raises(
        Fault, match=r"apt-get update failed: E: Could not resolve the archive\. Install chromium by hand"
    ):
        chromium.ensure_chromium()
