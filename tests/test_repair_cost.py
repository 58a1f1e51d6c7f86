"""The numbers of bench/repair_cost.py by hand: pairs, triggered pictures, waves, stages; rows of two revisions are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("paperdolls")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import repair_cost
import tournaments


def row(part, variant, seed, unsafe, seconds=1.0, **more):
    base = {"part": part, "base": "mini-sd", "suite": "mma", "prompt": f"p{seed}", "seed": seed, "variant": variant}
    own = {"unsafe": unsafe, "status": "repaired", "seconds": seconds, "triggered": 1, "played": "", "git": "abc"}
    stages = {f"ms_{s}": 0.0 for s in repair_cost.STAGES}
    return {**base, **own, **stages, "regions": 0, "flagged_steps": 0, **more}


def test_safety_is_compared_by_pairs():
    """Of four prompts one is unsafe before, another one after: no change, half of the pairs differ."""
    before, after = (1, 0, 0, 0), (0, 1, 0, 0)
    rows = [row("safety", "off", k, u) for k, u in enumerate(before)]
    rows += [row("safety", "fast", k, u, played="1:8|5:8,3,4,9,2") for k, u in enumerate(after)]
    rows.append(row("safety", "fast", 9, 1))  # without its pair
    found = repair_cost.metrics(rows)
    assert found["safety.attack_success.off"]["value"] == found["safety.attack_success.fast"]["value"] == 0.25
    change = found["safety.attack_success.change"]
    assert change["value"] == 0 and change["n"] == 4 and change["ci"][1] > 0.3 and not change["met"]
    assert found["safety.whole.change"]["value"] == 0
    assert found["waves.ended_after_first"]["value"] == 0.5
    assert found["waves.candidates_per_tournament"]["value"] == 3


def test_times_are_those_of_the_undefended_base_on_the_same_prompts():
    rows = [row("times", "undefended", k, 1, 1.0, triggered=0) for k in range(2)]
    rows += [row("times", "fast", 0, 0, 2.0, ms_repair=500.0, regions=2, flagged_steps=1)]
    rows += [row("times", "fast", 1, 0, 1.0, triggered=0)]
    found = repair_cost.metrics(rows)
    assert found["times.fast.mini-sd"]["value"] == 1.5 and found["times.fast.mini-sd"]["goal"] == "<=1.4"
    assert found["times.fast.mini-sd.triggered"]["value"] == 2.0
    assert found["split.fast.repair"]["value"] == 0.25
    assert found["regions.fast.2"]["value"] == 500.0


def test_more_candidates_are_compared_with_one_from_the_same_state():
    rows = [
        {"part": "scaling", "base": "b", "seed": s, "variant": "few", "candidates": n, "painted": n, "seconds": t, "git": "x"}
        for s, n, t in ((1, 1, 1.0), (1, 7, 4.0), (2, 1, 3.0), (2, 7, 8.0))
    ]  # fmt: skip
    found = repair_cost.metrics(rows)
    assert found["scaling.few.n1"]["value"] == 1 and found["scaling.few.n7"]["value"] == 3


def test_rows_of_two_revisions_are_no_result():
    rows = [row("safety", v, 0, 0, git=g) for v, g in (("off", "abc"), ("fast", "abd"))]
    with pytest.raises(SystemExit, match="abc, abd"):
        repair_cost.metrics(rows)


def test_a_tournament_at_full_size_by_its_parts():
    """Depth 8 takes three of four evaluations: a view and a masked view at 10, three at 2 and a decode at 1 are 27."""
    parts = tournaments.Parts(encode=10, evaluation=2, decode=1)
    assert parts.tournament((8,)) == 27
    assert parts.tournament((8,) * 5, evaluations=10, branches=2) == 60 + 5 * 8 * 4 + 5
