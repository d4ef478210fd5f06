import json


def test_rows_that_cannot_be_written_are_told_and_still_come_out(pack, tmp_path, caplog, monkeypatch):
    module = pack("nodes.benchmark_run")
    (tmp_path / module.FOLDER).write_text("a file where the folder belongs")
    monkeypatch.setattr(module.host, "output_folder", lambda: str(tmp_path))

    file = module.new_file()
    text = module.write(file, [{"model": "m"}], None)

    assert json.loads(text)["rows"] == [{"model": "m"}]
    assert f"its rows cannot be written to {file}" in caplog.text
