import json


def test_rows_that_cannot_be_written_are_told_and_still_come_out(pack, tmp_path, caplog):
    file = str(tmp_path / "gone" / "bench.json")

    text = pack("nodes.benchmark_run").write(file, [{"model": "m"}], None)

    assert json.loads(text)["rows"] == [{"model": "m"}]
    assert f"its rows cannot be written to {file}" in caplog.text
