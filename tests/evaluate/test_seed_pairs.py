"""Seed pairs: AUC within prompts and over all by hand, a detector that reads prompts, rows once."""

from __future__ import annotations

import pytest

from guardpaint.bases import Base
from guardpaint.errors import BadInput
from guardpaint.evaluate import seed_pairs
from guardpaint.guard import GuardPaint
from guardpaint.store.rows import read_rows
from guardpaint.testbed import Prompt
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat


def test_pairs_are_ranked_as_worked_out_by_hand():
    assert seed_pairs.ranked([0.9, 0.5], [0.5, 0.1]) == (3.5, 4)
    assert seed_pairs.ranked([], [0.5]) == (0.0, 0)


def rows_of(prompt, pairs):
    return [{"base": "b", "prompt": prompt, "seed": i, "unsafe": u, **scores} for i, (u, scores) in enumerate(pairs)]


def test_a_detector_that_reads_prompts_is_at_one_half_within_them():
    """The prompt's sort is right over all in 4 + 2·½ + 2·… pairs, but within each prompt all seeds score the same."""
    harmful = [(1, {"score.eye": 0.9, "score.prompt": 1}), (1, {"score.eye": 0.8, "score.prompt": 1})]
    harmful += [(0, {"score.eye": 0.2, "score.prompt": 1})]
    benign = [(0, {"score.eye": 0.1, "score.prompt": 0})] * 2
    rows = rows_of("a knife", harmful) + rows_of("a cat", benign)
    found = seed_pairs.metrics(rows, ["eye", "prompt"], "s")
    assert found["s.eye.auc_within"]["value"] == 1 == found["s.eye.auc_all"]["value"]
    assert found["s.prompt.auc_within"]["value"] == 0.5 and found["s.prompt.auc_within"]["n"] == 1
    assert found["s.prompt.auc_all"]["value"] == pytest.approx((2 * 2 + 2 * 0.5) / 6)
    assert found["s.mixed"]["value"] == 1 and found["s.prompts"]["value"] == 2


def test_pictures_a_judge_failed_on_are_left_out():
    rows = rows_of("a", [(1, {"score.j": 0.9}), (1, {"score.j": None}), (0, {"score.j": 0.5})])
    assert seed_pairs.within(rows, "score.j")["value"] == 1
    assert seed_pairs.within(rows_of("a", [(1, {"score.j": 0.9})]), "score.j")["value"] is None


class Bright:
    """A judge that says how bright a picture is, or fails."""

    attributes = False

    def __init__(self, identity, fails=False):
        self.identity, self.fails = identity, fails

    def verdict(self, image, asked):
        if self.fails:
            raise ValueError("no eyes")
        return ("nudity" if max(image.convert("L").resize((1, 1)).getdata()) > 127 else "safe"), {}


def test_every_prompt_is_drawn_with_every_seed_once(tmp_path):
    call = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}
    base = Base("tiny-sd", small.pipeline("sd"), call)
    judges = {"bright": Bright("b"), "broken": Bright("c", fails=True)}
    prompts = [Prompt("0", "words", 1, "nudity"), Prompt("1", "more words", 2, "safe")]
    guard = GuardPaint(AlwaysSafe(), PaintsFlat())
    asked = seed_pairs.SeedPairs(guard, [base], prompts, Bright("a"), judges, tmp_path, 3)
    rows = asked.measure()
    assert len(rows) == 6 == len({(r["prompt"], r["seed"]) for r in rows}) and asked.measure() == rows
    assert len(read_rows(tmp_path / "rows.jsonl")) == 6
    assert all(r["score.bright"] == r["unsafe"] and r["score.broken"] is None for r in rows)
    assert {r["score.prompt"] for r in rows} == {0.0, 1.0}
    with pytest.raises(BadInput, match="cannot be called auditor"):
        seed_pairs.SeedPairs(guard, [base], prompts, Bright("a"), {"auditor": Bright("b")}, tmp_path).measure()
