import json

import pytest

from runtime.__main__ import main
from tests.runtime.models.awq_writer import TINY_QWEN2, tiny_qwen2_weights, write_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", TINY_QWEN2, tiny_qwen2_weights())


def test_repack_prints_the_folder_and_check_then_proves_it(folder, tmp_path, capsys):
    where = str(tmp_path / "cache")

    assert main(["repack", str(folder), "--into", where]) == 0
    made = capsys.readouterr().out.strip()
    assert main(["repack", str(folder), "--into", where, "--check"]) == 0

    assert made.startswith(where)
    assert "holds the same weights, bit for bit" in capsys.readouterr().out


def test_check_before_any_repack_writes_nothing(folder, tmp_path, capsys):
    assert main(["repack", str(folder), "--into", str(tmp_path / "cache"), "--check"]) == 0

    assert "genuine" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_check_exits_1_on_damage(folder, tmp_path, capsys):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])

    assert main(["repack", str(folder), "--into", str(tmp_path / "cache"), "--check"]) == 1

    assert capsys.readouterr().out.startswith("damaged: ")


def test_check_exits_1_on_a_damaged_repack(folder, tmp_path, capsys):
    where = str(tmp_path / "cache")
    main(["repack", str(folder), "--into", where])
    made = next((tmp_path / "cache" / "repacked").iterdir()) / "model.safetensors"
    blob = bytearray(made.read_bytes())
    blob[-1] ^= 0x40
    made.write_bytes(blob)
    capsys.readouterr()

    assert main(["repack", str(folder), "--into", where, "--check"]) == 1

    assert "differ" in capsys.readouterr().out


def test_what_is_no_awq_exits_1_with_a_sentence(folder, tmp_path, capsys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))

    assert main(["repack", str(folder), "--into", str(tmp_path / "cache")]) == 1

    assert capsys.readouterr().err.startswith("This is no AWQ model: its config says fp8.")
