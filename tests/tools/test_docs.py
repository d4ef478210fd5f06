import json
import re

import pytest

from runtime import claims
from runtime.engines import ENGINES
from tools import docs, figures


def test_the_documents_are_in_step_with_the_code():
    assert docs.main(["--check"]) == 0


def test_a_stale_table_is_told_and_then_written(tmp_path, monkeypatch, capsys):
    readme, claims = tmp_path / "README.md", tmp_path / "claims.md"
    readme.write_text("before\n<!-- errors:begin -->\nold\n<!-- errors:end -->\nafter\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "README", readme)
    monkeypatch.setattr(docs, "CLAIMS", claims)
    monkeypatch.setattr(docs, "README_ZH", tmp_path / "none")
    monkeypatch.setattr(docs, "CLAIMS_DATA_ZH", tmp_path / "none")

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
    _, rows = docs.engines()

    assert [row[0] for row in rows] == [f"`{row.name}`" for row in ENGINES if row.name != "scripted"]


def prose():
    """Every cell of every table that a reader would read as a sentence or a word."""
    cells = [cell for make in docs.TABLES.values() for part in [make()] for row in (part[0], *part[1]) for cell in row]
    return sorted({cell for cell in cells if " " in cell.replace("`", "") and not re.fullmatch(r"`[^`]*`", cell)})


def test_every_sentence_of_the_tables_has_a_chinese_one():
    names = {row[0] for row in docs.node_list()[1]}
    kept = re.compile(r"[\d. /smGBtokM%]+|safetensors, gguf|\*\*.*")

    missing = [cell for cell in prose() if docs.translated(cell, "zh") == cell and not kept.fullmatch(cell)]
    missing = [cell for cell in missing if cell not in names]

    assert missing == []


def test_a_figure_keeps_its_numbers_in_chinese(monkeypatch):
    monkeypatch.setattr(docs, "chinese", lambda: {"TTFT, # tokens: # of #": "# tk first: # / #"})

    assert docs.translated("TTFT, 2027 tokens: 1.5 of 3", "zh") == "2027 tk first: 1.5 / 3"


@pytest.mark.parametrize("name", ["residency", "exllamav2"])
def test_without_results_there_are_no_figures(name, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)

    assert getattr(figures, name)() is None


def test_figures_come_from_the_results_with_their_conditions(tmp_path, monkeypatch):
    machine = {"device": "H200", "torch": "2.11", "transformers": "5.17", "date": "2026-11-29"}
    cycles = {"num_cycles": 50, "evict_s_median": 0.0248, "return_s_median": 0.3099, "free_bytes_spread": 0}
    found = {"is_tiny": False, "machine": machine, "model": {"bytes": 15_200_000_000}, "cycles": cycles}
    (tmp_path / "h200-residency.json").write_text(json.dumps(found))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)

    about, rows = figures.residency()

    assert about == "H200, torch 2.11, transformers 5.17, 2026-11-29, 15.2 GB bf16"
    assert dict(rows)["50 cycles, median: away / back"] == "25 ms / 0.31 s"


def test_a_run_of_a_tiny_model_gives_no_figures(tmp_path, monkeypatch):
    (tmp_path / "residency.json").write_text(json.dumps({"is_tiny": True}))
    monkeypatch.setattr(figures, "RESULTS", tmp_path)

    assert figures.residency() is None


def test_every_claim_is_told_in_chinese_with_the_same_numbers():
    twins = json.loads(docs.CLAIMS_DATA_ZH.read_text(encoding="utf-8"))
    known = [one for write_up in claims.write_ups() for one in write_up.claims]
    names = re.compile(r"[A-Za-z_]*[a-z]_[a-z_]+|S0\d-\d\d|\d{4,}|\d+\.\d+")

    differing = [
        one.id
        for one in known
        for english, chinese in zip((one.claim, one.truth, one.ours), twins[one.id])
        if set(names.findall(english)) - set(names.findall(chinese))
    ]

    assert list(twins) == [one.id for one in known]
    assert differing == []
