"""Proposers side by side: paired rows, numbers from rows by hand, a plot of every knob."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from guardpaint.evaluate import proposers
from guardpaint.guard import GuardPaint
from guardpaint.repair.knobs import FixedProposer, UniformProposer
from guardpaint.repair.ranker import Ranker
from guardpaint.store.results import read_rows
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysUnsafe
from guardpaint.train.rollouts import State


class CallsDarkSafe:
    """A judge that calls dark pictures safe."""

    attributes = False
    identity = "dark"

    def verdict(self, image, asked):
        return ("safe" if sum(image.resize((1, 1)).getpixel((0, 0))) < 384 else "nudity"), {}


@pytest.fixture(scope="module")
def judge():
    return CallsDarkSafe()


@pytest.fixture(scope="module")
def guard():
    return GuardPaint(AlwaysUnsafe(), small.inpainter(0))


@pytest.fixture(scope="module")
def parts(guard):
    return guard.parts


@pytest.fixture(scope="module")
def states():
    g = torch.Generator().manual_seed(0)
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[20:40, 20:40] = True
    return [
        State("tiny-sd", "a person", "plain", i, 8, 10, 0.1, "nudity", torch.randn(4, 8, 8, generator=g),
              torch.rand(3, 64, 64, generator=g), mask)
        for i in range(2)
    ]  # fmt: skip


def test_winners_by_hand():
    assert proposers.chosen([0.0, 0.2, 0.9], first=False) == 2
    assert proposers.chosen([0.0, 0.2, 0.9], first=True) == 1
    assert proposers.chosen([0.0, 0.0], first=False) is None


def test_rows_are_paired_and_nested(states, parts, judge):
    rows = proposers.measure(states[0], parts, UniformProposer(), judge)
    assert [(r["proposer"], r["n"]) for r in rows] == [(p, n) for p in ("uniform", "first") for n in (3, 5, 7)]
    rows, first = rows[:3], rows[3:]
    assert rows[0]["steps"] < rows[1]["steps"] < rows[2]["steps"]
    assert all(r["accepted"] == 0 and r["utility"] == 0.0 for r in rows)
    assert [r["steps"] for r in first] == [r["steps"] for r in rows], "nothing was acceptable: all were tried"
    ranked = proposers.measure(states[0], parts, FixedProposer(), judge, Ranker())
    assert [r["part"] for r in ranked] == ["compare"] * 3 + ["ranker"] * 4, "first is told by uniform knobs alone"


def test_the_optimiser_finds_a_known_optimum(states, parts, monkeypatch):
    """Utility depends on guidance alone, best at 6, and every step costs: shallow and near 6 wins."""

    start = proposers.tournament_of(states[0], parts).state

    class Hill:
        state, seed = start, 0

        def play(self, knobs, name):
            found = [SimpleNamespace(utility=max(0.0, 1 - (k.cfg - 6) ** 2 / 20)) for k in knobs]
            return SimpleNamespace(record=SimpleNamespace(candidates=found))

    monkeypatch.setattr(proposers, "tournament_of", lambda state, parts: Hill())
    found = proposers.optimised(states, parts, trials=60)
    knobs = found.propose(start, 2, 0)
    assert found.name == "optimised" and knobs[0].depth == 1 and abs(knobs[0].cfg - 6) < 1
    again = proposers.optimised(states, parts, trials=60)
    assert again.propose(start, 1, 0)[0] == knobs[0]


def row(base="b", proposer="uniform", n=5, **more):
    values = {"part": "compare", "base": base, "proposer": proposer, "n": n, "accepted": 1, "utility": 0.4}
    values |= {"seed": 0, "prompt": "a"}
    return {**values, "oracle_safe": 1, "steps": 20, "seconds": 2.0, **more}


def test_numbers_come_from_rows():
    """Utilities 0.4 and 0 over 20 and 20 steps: 0.01 a step; half accepted. Regret 0.1 of 1, 16 of 40 steps saved."""
    rows = [row(), row(accepted=0, utility=0.0, oracle_safe=0), row(n=3)]
    rows += [
        {
            "part": "ranker",
            "proposer": "uniform",
            "seed": 0,
            "keep": 3,
            "best": 0.5,
            "kept": 0.4,
            "steps": 20,
            "spent": 12,
        },
        {
            "part": "ranker",
            "proposer": "uniform",
            "seed": 0,
            "keep": 3,
            "best": 0.5,
            "kept": 0.5,
            "steps": 20,
            "spent": 12,
        },
    ]
    out = proposers.metrics(rows)
    assert out["b.uniform.acceptance"]["value"] == 0.5 and out["b.uniform.utility"]["value"] == pytest.approx(0.2)
    assert out["b.uniform.utility_per_step"]["value"] == pytest.approx(0.01)
    assert out["b.uniform.n3.utility"]["value"] == pytest.approx(0.4)
    assert out["ranker.regret"]["value"] == pytest.approx(0.1) and out["ranker.saved"]["value"] == pytest.approx(0.4)
    assert out["ranker.regret"]["met"] is False and out["ranker.saved"]["met"] is True
    learned = {
        "part": "ranker",
        "proposer": "learned",
        "seed": 0,
        "keep": 3,
        "best": 0.5,
        "kept": 0.5,
        "steps": 20,
        "spent": 16,
    }
    out = proposers.metrics([*rows, learned])
    assert out["ranker.regret"]["value"] == 0.0, "the proposer that ships carries no name"
    assert out["ranker.uniform.regret"]["value"] == pytest.approx(0.1)


def test_proposers_are_compared_in_pairs():
    """From the same two states: 0.5 and 0.3 against 0.4 and 0.1 with as many steps; a third state has one side only.
    More utility in both states is sure; more in one and less in the other is not, whatever the mean."""
    rows = [row(utility=0.4), row(utility=0.1, seed=1), row(utility=0.9, seed=2)]
    assert "b.learned_over_uniform.utility" not in proposers.metrics(rows)
    rows += [row(proposer="learned", utility=u, steps=s, seed=k) for k, (u, s) in enumerate([(0.5, 10), (0.3, 30)])]
    out = proposers.metrics(rows)
    assert out["b.learned_over_uniform.utility"]["value"] == pytest.approx(0.15)
    assert out["b.learned_over_uniform.utility"]["n"] == 2
    assert out["b.learned_over_uniform.utility"]["ci"] == pytest.approx([0.1, 0.2])
    assert out["b.learned_over_uniform.utility"]["met"] is True
    assert out["b.learned_over_uniform.utility_per_step"]["value"] == pytest.approx(0.8 / 40 - 0.5 / 40)
    assert out["b.learned_over_uniform.oracle_safe"]["value"] == 0.0
    assert out["b.learned_over_uniform.oracle_safe"]["met"] is False
    assert out["all.learned_over_uniform.utility"] == out["b.learned_over_uniform.utility"]
    more = [row(proposer="learned", utility=0.3, steps=20), row(proposer="learned", utility=0.9, steps=20, seed=1)]
    unsure = proposers.metrics([*rows[:2], *more])["b.learned_over_uniform.utility"]
    assert unsure["value"] > 0 and unsure["met"] is False


def test_the_ranker_is_charged_for_its_previews(states, parts, judge):
    """By hand: it likes the third best; depths 3, and 3 + 8, and one step of each of the others."""
    rows = proposers.ranker_rows(states[0], "uniform", [2, 0, 1], [0.5, 0.9, 0.4], [8, 5, 3])
    assert [(r["keep"], r["kept"], r["spent"]) for r in rows] == [(1, 0.4, 5), (2, 0.5, 12)] and rows[0]["best"] == 0.9
    told = [r for r in proposers.measure(states[0], parts, UniformProposer(), judge, Ranker()) if "keep" in r]
    assert [r["keep"] for r in told] == [1, 2, 3, 4]
    assert all(r["spent"] >= 5 for r in told) and told[0]["spent"] < told[3]["spent"]


def test_a_run_measures_what_is_new(states, guard, judge, tmp_path, monkeypatch):
    path = tmp_path / "proposer.json"
    proposers.run(proposers.Comparison(guard, {"tiny-sd": states[:1]}, [UniformProposer()], judge), path)
    asked, original = [], proposers.measure
    monkeypatch.setattr(proposers, "measure", lambda *a: asked.append((a[0].seed, a[2].name)) or original(*a))
    out = proposers.run(
        proposers.Comparison(guard, {"tiny-sd": states}, [UniformProposer(), FixedProposer()], judge), path
    )
    assert asked == [(1, "uniform"), (0, "fixed"), (1, "fixed")]
    assert {"tiny-sd.uniform.utility", "tiny-sd.fixed.utility", "tiny-sd.first.utility"} <= set(out)
    out = proposers.run(proposers.Comparison(guard, {"tiny-sd": states}, [UniformProposer()], judge, Ranker()), path)
    assert asked[3:] == [(0, "uniform"), (1, "uniform")] and "ranker.saved" in out, "another ranker: played anew"
    assert len([r for r in read_rows(path) if r["part"] == "compare"]) == 3 * 2 * 3


def test_an_optimum_is_searched_once(states, guard, tmp_path, monkeypatch):
    searched = []
    found = FixedProposer(FixedProposer().knobs, name="optimised")
    monkeypatch.setattr(proposers, "optimised", lambda *a: searched.append(1) or found)
    file = tmp_path / "o.json"
    a, b = (proposers.optimised_once(states, guard, 3, file) for _ in range(2))
    assert a == b == found and searched == [1]
    proposers.optimised_once(states, guard, 4, file)
    assert searched == [1, 1]


def test_every_knob_is_plotted(tmp_path):
    g = torch.Generator().manual_seed(0)
    rows = [
        {"unclipped": torch.rand(20, generator=g).tolist(), "bucket": [0, 3, 5, 9], "utility": [0.1, 0.2, 0.0, 0.4]}
        for _ in range(10)
    ]
    assert proposers.dependence(rows, tmp_path / "k.png").stat().st_size > 0
