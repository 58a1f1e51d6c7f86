"""Labelers against hand labels: numbers by hand, thresholds that have not seen the picture, the table as files."""

from __future__ import annotations

import csv
import json

import pytest
from typer.testing import CliRunner

from guardpaint.cli.data import app
from guardpaint.data import comparison
from guardpaint.data.store import Corpus
from guardpaint.policy import Policy

POLICY = Policy.load("paper")


def hard_cases(count=40):
    """Half safe, a quarter of each harm; a third of the safe ones are swimwear."""
    labels = ["safe", "nudity", "safe", "violence"]
    return {
        f"k{i}": {"label": labels[i % 4], "case": "swimwear" if i % 12 in (0, 2) else "plain"} for i in range(count)
    }


def answer(label, sure=0.9, **more):
    return {"scores": dict.fromkeys(POLICY.names, 0.05) | {label: sure}, "problem": "", "seconds": 0.5, **more}


def right(reference):
    return {k: answer(v["label"]) for k, v in reference.items()}


def test_labelers_are_compared_on_the_hard_cases():
    reference = hard_cases()
    good = right(reference)
    fooled = {k: answer("nudity") if v["case"] == "swimwear" else good[k] for k, v in reference.items()}
    mumbles = {k: {"scores": None, "problem": "no JSON object"} for k in reference}
    odd = {k: {**v, "problem": "says safe but scores nudity"} for k, v in good.items()}
    half = {k: v if i % 4 else {"scores": None, "problem": "no JSON object"} for i, (k, v) in enumerate(good.items())}
    rows = comparison.compare(
        {"good": good, "fooled": fooled, "mumbles": mumbles, "odd": odd, "half": half}, reference, POLICY
    )
    by = {r["labeler"]: r for r in rows}
    assert by["good"]["f1"] == by["good"]["kappa"] == 1 and by["good"]["fp"] == by["good"]["fn"] == 0
    assert by["good"]["seconds"] == 0.5 and by["good"]["thresholds"] == "cross-fitted"
    assert by["good"]["f1_ci"][0] < 1 and by["good"]["precision_nudity_ci"][0] < 0.8, "ten pictures prove little"
    assert by["odd"]["contradictions"] == 40 and by["fooled"]["wrong_swimwear"] > 0.9 > by["fooled"]["kappa"]
    assert "failed" in by["mumbles"] and by["mumbles"]["unreadable"] == 40
    assert by["half"]["unreadable"] == 10 and by["half"]["recall_safe"] == pytest.approx(0.5), "unreadable is wrong"
    text = comparison.table(rows)
    assert "contradicts its own reasoning" in text and "worst on swimwear" in text and text.count("\n") == 7
    assert "**good**" in text and "**fooled**" not in text


def test_precision_recall_and_f1_by_hand():
    """Of six said nudity four are; of five that are four are found: P 2/3, R 4/5, F1 8/11."""
    reference = {f"k{i}": {"label": "nudity" if i < 5 else "safe", "case": "x"} for i in range(10)}
    said = {f"k{i}": "nudity" if i in (0, 1, 2, 3, 7, 8) else "safe" for i in range(10)}
    row = comparison.rates(list(reference), said, reference, POLICY)
    assert row["precision_nudity"] == pytest.approx(2 / 3) and row["recall_nudity"] == pytest.approx(0.8)
    assert row["f1_nudity"] == pytest.approx(8 / 11) and row["fp"] == pytest.approx(0.4) and row["fn"] == 0.2
    assert row["precision_violence"] is None and row["f1_violence"] == 0
    assert row["f1"] == pytest.approx((8 / 11 + 6 / 9 + 0) / 3)
    assert row["kappa"] == pytest.approx((0.7 - 0.5) / 0.5)
    assert row["f1_ci"][0] < row["f1"] < row["f1_ci"][1]


def test_no_picture_is_decided_by_thresholds_that_saw_it():
    """Scores that say nothing: fitted on the same pictures they look better than on others."""
    import random

    rng = random.Random(0)
    reference = hard_cases(120)
    noise = {
        k: {"scores": {"safe": 0.1, "nudity": rng.random(), "violence": rng.random()}, "problem": ""} for k in reference
    }
    row = comparison.compare({"noise": noise}, reference, POLICY)[0]
    assert row["thresholds"] == "cross-fitted" and abs(row["kappa"]) < 0.2
    few = {k: reference[k] for k in list(reference)[:5]}
    row = comparison.compare({"right": right(few)}, few, POLICY)[0]
    assert row["thresholds"] == "fitted on the same pictures"


def test_scores_near_the_threshold_are_counted_and_decided():
    """Of 0.05 and 0.9 the middle is 0.475: a harm at 0.5 lies near it, is found, and would be left out of a corpus."""
    reference = hard_cases()
    unsure = {k: answer(v["label"], 0.5 if i < 4 else 0.9) for i, (k, v) in enumerate(reference.items())}
    row = comparison.compare({"a": unsure}, reference, POLICY)[0]
    assert row["abstained"] == 2 and row["recall_nudity"] == row["f1"] == 1
    assert comparison.compare({"a": unsure}, reference, POLICY, margin=0.0)[0]["abstained"] == 0


def test_several_categories_count_one_by_one():
    """Two pictures show both harms; a labeler that finds one of them misses the other."""
    reference = {k: dict(v) for k, v in hard_cases().items()}
    both = [k for k, v in reference.items() if v["label"] == "nudity"][:2]
    for k in both:
        reference[k]["label"] = "nudity+violence"
    full = right({k: v for k, v in reference.items() if k not in both})
    one, two = answer("nudity"), {**answer("nudity"), "scores": {"safe": 0.0, "nudity": 0.9, "violence": 0.9}}
    rows = comparison.compare(
        {"one": full | dict.fromkeys(both, one), "two": full | dict.fromkeys(both, two)}, reference, POLICY
    )
    assert rows[0]["recall_violence"] == pytest.approx(10 / 12) and rows[1]["recall_violence"] == 1
    assert rows[1]["kappa"] == 1 > rows[0]["kappa"]


def test_the_table_by_command(tmp_path):
    """Two labels files of a corpus, hand labels in a CSV; the table as Markdown, CSV and JSON."""
    corpus, reference = Corpus(tmp_path / "corpus"), hard_cases()
    (tmp_path / "r.csv").write_text(
        "key,label,case\n" + "".join(f"{k},{v['label']},{v['case']}\n" for k, v in reference.items())
    )
    corpus.append("labels-a.jsonl", [{"key": k, **v} for k, v in right(reference).items()])
    corpus.append("labels-b.jsonl", [{"key": k, **answer("safe")} for k in list(reference)[:20]])
    command = [
        "compare",
        str(corpus.root),
        "--labels",
        "labels-a.jsonl",
        "--labels",
        "labels-b.jsonl",
        "--policy",
        "paper",
    ]
    command += ["--reference", str(tmp_path / "r.csv"), "--out", str(tmp_path / "tables/labelers.md")]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    text = (tmp_path / "tables/labelers.md").read_text()
    assert "Observed failure mode" in text.splitlines()[0] and "| 0.50 |" in text
    with (tmp_path / "tables/labelers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["f1"]) == 1 and float(rows[0]["fp_high"]) > 0 and rows[1]["n"] == "20"
    assert "misses unsafe images" in text and float(rows[1]["fn"]) == 1
    data = json.loads((tmp_path / "tables/labelers.json").read_text())
    assert data["files"]["labels-a.jsonl"] and data["policy"] == POLICY.digest() and len(data["labelers"]) == 2
