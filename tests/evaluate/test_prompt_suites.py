"""Suites of prompt files: names, samples, categories of the policy, and what is counted apart."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.data.prompt_files import Reading
from guardpaint.errors import BadInput
from guardpaint.evaluate import by_category, harness, page, prompt_suites, summary
from guardpaint.evaluate.jury import Jury
from guardpaint.evaluate.prompt_suites import PromptFiles, open_files
from guardpaint.evaluate.rows import EvaluationRow, RowStore, Verdict
from guardpaint.evaluate.run import Case
from guardpaint.policy import Policy

POLICY = Policy.default()
CATEGORIES = {"hate": 60, "violence": 30, "sexual": 9, "copyright": 1}


def write(path, rows, column="prompt"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{column},category\n" + "".join(f"{text},{category}\n" for text, category in rows))
    return path


@pytest.fixture
def file(tmp_path):
    rows = [(f"{category} {i}", category) for category, n in CATEGORIES.items() for i in range(n)]
    return write(tmp_path / "set.csv", rows)


def harmful(**more):
    return PromptFiles(Reading(harmful=True), **more)


def test_a_sample_has_every_category_in_proportion(file):
    for seed in range(3):
        found = open_files(file, 20, harmful(seed=seed), POLICY)
        counts = Counter(c.kind for c in found.cases[0])
        assert sum(counts.values()) == 20
        assert all(abs(counts[name] - n / 5) <= 1 for name, n in CATEGORIES.items()), counts
        assert f"set: 20 of 100 prompts, a sample stratified by category (seed {seed})" in found.notes[0]


def test_samples_of_one_seed_are_nested_and_keep_their_seeds(file):
    small, large, whole = (open_files(file, n, harmful(), POLICY).cases[0] for n in (10, 30, None))
    assert large[:10] == small and whole[:30] == large and len(whole) == 100
    assert {c.seed for c in whole} == set(range(100)) and len({c.prompt for c in whole}) == 100
    other = open_files(file, 10, harmful(seed=1), POLICY).cases[0]
    assert {c.prompt for c in other} != {c.prompt for c in small}
    assert not open_files(file, None, harmful(), POLICY).notes


def test_suites_are_named_after_their_files(tmp_path):
    for name in ("DACA.csv", "PGJ.csv", "one/x.csv", "two/x.csv", "two/y.csv", "two/y.json", "benign.csv"):
        write(tmp_path / name, [("a cup", "")])
    (tmp_path / "two" / "y.json").write_text(json.dumps(["a cup"]))
    found = open_files(tmp_path, None, harmful(), POLICY)
    suites = [cases[0].suite for cases in found.cases]
    assert suites == ["DACA", "PGJ", "benign-file", "one-x", "two-x", "two-y.csv", "two-y.json"]
    named = open_files(tmp_path, None, harmful(name="jdb"), POLICY)
    assert [cases[0].suite for cases in named.cases][:2] == ["jdb-DACA", "jdb-PGJ"]
    (one,) = open_files(tmp_path / "DACA.csv", None, harmful(name="mine"), POLICY).cases
    assert one[0].suite == "mine"


def test_the_table_of_categories_is_shown(file):
    found = open_files(file, 5, harmful(), POLICY)
    assert [str(line) for line in found.table] == [
        "set: hate → outside the policy, counted apart (60 prompts)",
        "set: violence → violence (30 prompts)",
        "set: sexual → nudity (9 prompts)",
        "set: copyright → outside the policy, counted apart (1 prompts)",
    ]
    mine = open_files(file, None, harmful(mapping=["hate=violence"]), POLICY)
    assert Counter(c.category for c in mine.cases[0]) == {"violence": 90, "nudity": 9, "outside": 1}


def test_what_nobody_says_is_unknown(file):
    found = open_files(file, None, PromptFiles(), POLICY)
    assert {c.category for c in found.cases[0]} == {"unknown"} and {t.policy for t in found.table} == {"unknown"}
    benign = open_files(file, None, PromptFiles(Reading(harmful=False)), POLICY)
    assert {c.category for c in benign.cases[0]} == {"safe"} and {t.policy for t in benign.table} == {"safe"}


def test_a_set_about_one_harm_needs_no_column(tmp_path):
    path = tmp_path / "mma.csv"
    path.write_text("target_prompt,adv_prompt,sanitized_adv_prompt\na,b,c\n")
    (cases,) = open_files(path, None, PromptFiles(), POLICY).cases
    assert (cases[0].category, cases[0].kind, cases[0].prompt) == ("nudity", "", "b")
    (cases,) = open_files(path, None, PromptFiles(Reading(column="sanitized_adv_prompt")), POLICY).cases
    assert cases[0].prompt == "c"


def row(i, category, kind, unsafe, defence="undefended", source="a"):
    return EvaluationRow(
        key=f"{defence}{i}", suite="set", base="sd", defence=defence, config="", id=str(i), kind=kind, category=category,
        prompt=f"p{i}", seed=i, status="plain", seconds=1.0, threads=1, image="", git="", picture=f"{i}", source=source,
        verdict=Verdict("j", released=True, unsafe=unsafe, said="nudity" if unsafe else "safe"),
    )  # fmt: skip


ROWS = [
    row(0, "nudity", "sexual", True),
    row(1, "nudity", "sexual, shocking", False, source="b"),
    row(2, "outside", "copyright", True),
    row(3, "unknown", "", True),
    row(4, "safe", "", True),
]


def test_prompts_outside_of_the_policy_are_counted_apart():
    found = {**summary.metrics(ROWS), **by_category.metrics(ROWS)}
    value = {name: (m["value"], m["n"]) for name, m in found.items()}
    assert value["set.sd.asr.undefended"] == (0.5, 2), "neither outside, nor unknown, nor benign"
    assert value["by_category.set.sd.undefended.sexual"] == (0.5, 2)
    assert value["by_category.set.sd.undefended.shocking"] == (0.0, 1)
    assert value["by_source.set.sd.undefended.a"] == (1.0, 1) and value["by_source.set.sd.undefended.b"] == (0.0, 1)
    assert value["outside.set.sd.undefended"] == (1.0, 1) and value["unknown.set.sd.undefended"] == (1.0, 1)
    assert found["by_category.set.sd.undefended.sexual"]["note"] == "policy: nudity"


def test_rows_keep_their_source():
    stored = ROWS[1].to_dict()
    assert EvaluationRow.from_dict(stored) == ROWS[1]
    del stored["source"]
    assert EvaluationRow.from_dict(stored).source == ""
    assert by_category.metrics([EvaluationRow.from_dict(stored)]) == {}, "prompts of a testbed are not of a file"


class Blind:
    """A judge that is never asked."""

    attributes = False
    identity = "blind"

    def verdict(self, image, asked):
        raise AssertionError("a picture was judged again")


def test_rows_that_were_drawn_take_over_what_is_said_of_their_prompts(tmp_path):
    """A file is first read as unknown, then declared benign: its pictures stay, their category does not."""
    rows = RowStore(tmp_path)
    rows.add(
        [row(3, "unknown", "", True), row(3, "unknown", "", True, defence="ours"), row(0, "nudity", "sexual", True)]
    )
    plan = harness.Plan(rows, tmp_path, jury=Jury.of(Blind()), metrics={})
    case = Case("set", "3", "p3", 3, "street", "safe", source="a")
    assert not list(plan.accept([case]))
    found = {r.key: (r.category, r.kind, r.picture) for r in RowStore(tmp_path).found.values()}
    assert found["undefended3"] == found["ours3"] == ("safe", "street", "3")
    assert found["undefended0"][0] == "nudity", "no prompt of the file any more"
    (line,) = plan.accept([replace(case, prompt="p9")])
    assert "set: 1 prompts of an earlier run are no longer in it" in line and "--name" in line


def test_the_report_shows_the_table(tmp_path, file):
    table = open_files(file, None, harmful(), POLICY).table
    prompt_suites.keep_table(tmp_path, table)
    prompt_suites.keep_table(tmp_path, table)
    assert prompt_suites.read_table(tmp_path) == table
    text = page.write(ROWS, tmp_path).read_text()
    assert "<td>hate</td><td>outside</td>" in text and "by_category.set.sd.undefended.sexual" in text


def test_the_command_shows_how_a_file_is_read(file):
    result = CliRunner().invoke(app, ["eval", "prompts", str(file), "--harmful"])
    assert result.exit_code == 0, result.output
    assert "set: table, 100 prompts: " in result.stdout and "39 harmful" in result.stdout
    assert "61 harmful but outside of the policy" in result.stdout
    assert "set: sexual → nudity (9 prompts)" in result.stdout
    asks = CliRunner().invoke(app, ["eval", "prompts", str(file)])
    assert "100 unknown" in asks.stdout and "--harmful or --benign" in asks.stderr


def test_a_bad_map_is_named(file):
    with pytest.raises(BadInput, match="POLICY is one of nudity, violence, outside"):
        open_files(file, None, harmful(mapping=["hate=x"]), POLICY)
