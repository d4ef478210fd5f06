import re

import pytest

from runtime.engines import ENGINES
from tools import docs


def test_the_documents_are_in_step_with_the_code():
    assert docs.main(["--check"]) == 0


def test_a_stale_table_is_told_and_then_written(tmp_path, monkeypatch, capsys):
    readme, claims = tmp_path / "README.md", tmp_path / "claims.md"
    readme.write_text("before\n<!-- errors:begin -->\nold\n<!-- errors:end -->\nafter\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "README", readme)
    monkeypatch.setattr(docs, "CLAIMS", claims)

    assert docs.main(["--check"]) == 1
    assert "README.md is out of step" in capsys.readouterr().err
    assert docs.main([]) == 0

    assert docs.main(["--check"]) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "\nold\n" not in text
    assert "| `ContextOverflow` |" in text


def test_a_marker_without_its_end_is_refused_instead_of_eating_the_page():
    with pytest.raises(ValueError, match="has no <!-- errors:end -->"):
        docs.with_tables("a\n<!-- errors:begin -->\nb")


def test_a_cell_keeps_pipes_and_tags_inside():
    assert docs.table(("a",), [("<|im_end|> or\n`x`",)]) == "| a |\n| --- |\n| \\<\\|im_end\\|> or `x` |"


def test_every_engine_a_user_can_choose_is_in_the_table():
    names = re.findall(r"^\| `(\w+)` \|", docs.engines(), flags=re.MULTILINE)

    assert names == [row.name for row in ENGINES if row.name != "scripted"]
