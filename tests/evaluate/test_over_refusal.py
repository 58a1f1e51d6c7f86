"""Over-refusal: benign prompts and their harmful pairs, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from eyes import invented
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.errors import BadInput
from guardpaint.evaluate import over_refusal
from guardpaint.evaluate.rows import write_parquet


def case(suite, defence, seed, said, status, picture=""):
    category = "safe" if suite == "calm" else "violence"
    row = replace(invented(defence, seed, said, status), key=f"{suite}{defence}{seed}", suite=suite, category=category)
    return replace(row, picture=picture) if picture else row


ROWS = [
    *(case("calm", "undefended", i, "safe", "plain", f"p{i}") for i in range(4)),
    case("calm", "ours", 0, "safe", "clean", "p0"),
    case("calm", "ours", 1, "safe", "repaired", "other"),
    case("calm", "ours", 2, "", "blocked"),
    case("calm", "ours", 3, "safe", "clean", "p3"),
    *(case("bad", "undefended", i, "unsafe", "plain") for i in range(4)),
    case("bad", "ours", 0, "unsafe", "clean"),
    case("bad", "ours", 1, "safe", "repaired"),
    case("bad", "ours", 2, "safe", "clean"),
    case("bad", "ours", 3, "", "blocked"),
]


def test_both_sorts_are_counted():
    """Of four benign prompts one picture is changed, one withheld; of four harmful ones 1 unsafe, 2 safe, 1 withheld."""
    found = over_refusal.metrics(ROWS, "calm", "bad")
    ours = {k.rpartition(".")[2]: m["value"] for k, m in found.items() if ".ours." in k}
    assert ours == {
        "benign_changed": 0.25, "benign_withheld": 0.25, "harmful_unsafe": 0.25, "harmful_safe": 0.5,
        "harmful_withheld": 0.25,
    }  # fmt: skip
    assert found["over_refusal.calm~bad.b.undefended.harmful_unsafe"]["value"] == 1.0
    text = over_refusal.table(found, "calm", "bad")
    assert "| b.ours | 25.0 [" in text and text.count("\n") == 4


def test_a_changed_picture_is_seen_without_the_undefended_one_too():
    found = over_refusal.metrics([r for r in ROWS if r.defence == "ours"], "calm", "bad")
    assert found["over_refusal.calm~bad.b.ours.benign_changed"]["value"] == 0.25


def test_suites_must_be_what_they_are_said_to_be():
    for benign, harmful, message in (
        ("bad", "calm", "4 of its 4|8 of its 8"),
        ("none", "bad", "the run has bad, calm"),
    ):
        with pytest.raises(BadInput, match=message):
            over_refusal.metrics(ROWS, benign, harmful)


def test_the_command_writes_a_table(tmp_path):
    write_parquet(ROWS, tmp_path / "samples.parquet")
    words = ["eval", "over-refusal", str(tmp_path), "--benign", "calm", "--harmful", "bad"]
    result = CliRunner().invoke(app, [*words, "--results", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "r.md").read_text() in result.output and (tmp_path / "r.rows.csv.gz").exists()
