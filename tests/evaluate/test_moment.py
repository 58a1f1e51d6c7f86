"""When to step in: starts that differ in their audits only, rows once, numbers by hand."""

from __future__ import annotations

import pytest
import torch

from guardpaint.bases import Base
from guardpaint.evaluate import moment, moment_results
from guardpaint.guard import GuardPaint
from guardpaint.store.rows import read_rows
from guardpaint.testbed import Prompt
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, PaintsFlat


class Dark:
    """A judge that calls dark pictures unsafe."""

    identity, attributes = "dark", False

    def verdict(self, image, asked):
        mean = sum(image.convert("L").resize((1, 1)).getdata())
        return ("violence" if mean < 128 else "safe"), {}


@pytest.fixture(scope="module")
def base():
    call = {"num_inference_steps": 10, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}
    return Base("tiny-sd", small.pipeline("sd"), call)


def measured(guard, base, folder, prompts=1):
    torch.manual_seed(0)
    texts = [Prompt(str(i), f"words {i}", 5 + i, "violence") for i in range(prompts)]
    return moment.measure(moment.MomentOptions(guard, [base], texts, Dark(), folder))


def test_without_a_trigger_all_starts_draw_the_same(base, tmp_path):
    """Nothing is repaired, so every picture is the undefended one; only the audits differ."""
    rows = measured(GuardPaint(AlwaysSafe(), PaintsFlat()), base, tmp_path)
    assert [r["start"] for r in rows[::2]] == ["s40", "s55", "s70", "s85", "end"] and len(rows) == 10
    assert len({r["unsafe"] for r in rows}) == 1 and {r["accepted"] for r in rows} == {0}
    assert [r["audits"] for r in rows[::2]] == [6, 4, 3, 1, 0], "steps with progress ≥ start, without the last"
    assert not any("seam" in r for r in rows) and {r["status"] for r in rows if r["part"] == "both"} == {"clean"}


def test_repairs_inside_and_at_the_end_are_told_apart(base, tmp_path):
    """Everything is flagged and every repair is refused: nothing is painted, and tournaments are counted by part."""
    rows = measured(GuardPaint(AlwaysUnsafe(), PaintsFlat()), base, tmp_path)
    inside = {r["start"]: r["tournaments"] for r in rows if r["part"] == "trajectory"}
    both = {r["start"]: r["tournaments"] for r in rows if r["part"] == "both"}
    assert inside["end"] == 0 and inside["s40"] > inside["s85"] > 0
    assert all(both[s] > inside[s] for s in both), "the final repair is played too"
    assert {r["status"] for r in rows if r["part"] == "both"} == {"released_flagged"}, "no ladder withholds it"
    assert all(r["flagged"] == 1 and r["whole"] == 0 for r in rows)


def test_rows_are_made_once_and_not_taken_from_other_weights(base, tmp_path):
    guard = GuardPaint(AlwaysSafe(), PaintsFlat())
    first = measured(guard, base, tmp_path, 2)
    assert measured(guard, base, tmp_path, 2) == first and len(read_rows(tmp_path / "rows.jsonl")) == 20
    measured(guard.configured(candidates=3), base, tmp_path, 2)
    assert len(read_rows(tmp_path / "rows.jsonl")) == 40


def row(start, part, seed, unsafe, **more):
    whole = int(not unsafe)
    return {
        "base": "b", "prompt": f"p{seed}", "seed": seed, "start": start, "part": part, "unsafe": unsafe, "whole": whole,
        "seconds": 2.0, "accepted": 1, **more,
    }  # fmt: skip


def test_rates_and_differences_are_of_the_same_scenes():
    """Of 20 scenes the end leaves harm in four and a start at 0.7 in two of these; before its final repair in six."""
    rows = []
    for seed in range(20):
        rows += [row("end", "trajectory", seed, 1), row("end", "both", seed, int(seed < 4))]
        rows += [row("s70", "trajectory", seed, int(seed < 6), seam=0.5), row("s70", "both", seed, int(seed < 2))]
    found = moment_results.metrics(rows)
    asr = {arm: found[f"moment.pilot.{arm}.asr"]["value"] for arm in ("end", "s70", "s70_inside", "undefended")}
    assert asr == {"end": 0.2, "s70": 0.1, "s70_inside": 0.3, "undefended": 1.0}
    assert found["moment.pilot.s70.asr_over_end"]["value"] == pytest.approx(-0.1)
    low, high = found["moment.pilot.s70.whole_over_end"]["ci"]
    assert low <= 0.1 <= high and found["moment.pilot.s70_inside.seam"]["value"] == 0.5
    assert found["moment.pilot.scenes_needed"]["value"] == moment_results.scenes_needed(0.1)
    assert "s70 90 % whole, 10 % harm" in moment_results.suggestion(found)
    assert moment_results.figure(rows).axes


def test_the_number_of_scenes_is_as_worked_out_by_hand():
    assert moment_results.scenes_needed(0.2, 0.1) == 155
    assert moment_results.scenes_needed(0.01, 0.1) == moment_results.scenes_needed(0.1, 0.1), "a change needs changes"
