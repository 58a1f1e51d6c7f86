"""Intervals and distances against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from guardpaint.evaluate.statistics import agreement, bootstrap, effective, kid, ratio_interval, share, wilson


def test_wilson_by_hand():
    """8 of 10 at z = 1.96: (0.8 + 0.19208 ± 1.96·√(0.016 + 0.0096))/1.38416 → 0.4902, 0.9433."""
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3) and high == pytest.approx(0.9433, abs=1e-3)
    assert wilson(0, 0) == (0.0, 1.0) and wilson(0, 113.7)[0] == 0.0 and wilson(113.7, 113.7)[1] == 1.0


def test_bootstrap_covers_the_mean_and_is_repeatable():
    values = [0.0, 1.0] * 50
    low, high = bootstrap(values)
    assert low < 0.5 < high and 0.15 < high - low < 0.25 and bootstrap(values) == (low, high)


def test_pictures_of_one_scene_are_not_independent():
    """Ten scenes of ten pictures each that all agree: about as good as ten pictures, not as a hundred."""
    hits = [scene < 2 for scene in range(10) for _ in range(10)]
    scenes = [scene for scene in range(10) for _ in range(10)]
    assert effective(hits, scenes) == 10, "hits in two scenes only: scenes are counted"
    assert effective(hits, range(100)) == 100 and effective([False] * 100, scenes) == 10
    assert effective([True, False] * 5, ["one"] * 10) == 1
    alone, together = share(hits, None), share(hits, None, scenes)
    assert alone["value"] == together["value"] == 0.2 and alone["n"] == together["n"] == 100
    assert together["ci"] == pytest.approx(wilson(2, 10)) and together["ci"][1] > alone["ci"][1] + 0.1
    none, one = ([k < hit for k in range(100)] for hit in (0, 1))
    assert share(none, None, scenes)["ci"][1] < share(one, None, scenes)["ci"][1], "fewer hits, no worse bound"
    half = [scene % 2 == 0 for scene in scenes]
    fewer = (1.98422 / 2.26216) ** 2  # t of 99 and of 9 degrees
    assert effective(half, scenes) == pytest.approx(9 * fewer, rel=1e-4), "G − 1 by the design effect, less by t"
    mixed = [k % 2 == 0 for k in range(100)]  # every scene like every other: as many as there are, less by t
    assert effective(mixed, scenes) == pytest.approx(100 * fewer, rel=1e-4)


def test_groups_are_resampled_whole():
    values, groups = [0.0] * 50 + [1.0] * 50, ["a"] * 50 + ["b"] * 50
    assert bootstrap(values, groups=groups) == (0.0, 1.0)
    low, high = ratio_interval([1.0, 1.0], [2.0, 4.0])
    assert (low, high) == (0.25, 0.5), "both from the first, or both from the second"


def test_kid_by_hand():
    """One-dimensional a = (0, 0), b = (1, 1): kernels 1, 8 and 1 → 1 + 8 − 2·1 = 7; same sample → near 0."""
    zero, one = np.zeros((2, 1)), np.ones((2, 1))
    assert kid(zero, one) == pytest.approx(7.0)
    draw = np.random.default_rng(0).normal(size=(2, 400, 8))
    assert abs(kid(draw[0], draw[1])) < 0.05 < kid(draw[0], draw[1] + 1)


def test_agreement_counts_only_what_was_asked():
    rows = [{"right_background": 1, "right_garment": 0}, {"right_background": "1", "right_garment": ""}]
    found = agreement(rows, ">=0.85")
    assert found["value"] == pytest.approx(2 / 3) and found["n"] == 2 and not found["met"]


def test_agreement_of_some_attributes():
    rows = [{"right_background": 1, "right_garment": 0, "seed": 1}, {"right_garment": 1, "seed": 1}]
    assert agreement(rows, None, ("garment",))["value"] == 0.5
    assert agreement(rows, None, by="seed")["ci"] == pytest.approx([2 / 3, 2 / 3]), "one group: nothing to resample"
    assert agreement([{"said": "safe"}], ">=0.8") == {"value": None, "n": 0, "goal": ">=0.8", "met": False}
