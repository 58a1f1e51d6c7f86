"""Conformal risk control: by hand, as a property over random data, and the drift index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardpaint.audit import calibration as cal
from guardpaint.errors import BadInput


def test_how_many_are_needed():
    """α = 0.05: 1/20 ≤ 0.05 with n = 19; α = 0.1 with 9."""
    assert cal.needed(0.05) == 19 and cal.needed(0.1) == 9 and cal.needed(0.5) == 1


def test_the_largest_fitting_threshold_by_hand():
    """Nine examples, α = 0.2: (sum + 1)/10 ≤ 0.2 allows one miss, so the second column (one miss), not the third."""
    losses = np.zeros((9, 3))
    losses[0, 1:] = 1
    losses[1, 2:] = 1
    assert cal.controlled(losses, 0.2) == 1 and cal.controlled(losses, 0.3) == 2 and cal.controlled(losses, 0.1) == 0


def test_too_few_say_how_many():
    with pytest.raises(BadInput, match=r"5 nude scenes: a risk of 0.05 needs at least 19"):
        cal.controlled(np.zeros((5, 2)), 0.05, "nude scenes")
    with pytest.raises(BadInput, match="even the lowest threshold has a risk"):
        cal.controlled(np.ones((30, 2)), 0.05)
    with pytest.raises(BadInput, match="must not fall"):
        cal.controlled(np.array([[1.0, 0.0]] * 30), 0.5)
    with pytest.raises(BadInput, match="alpha=0"):
        cal.needed(0)


def test_a_trigger_threshold_by_hand():
    """Scores 0.1 … 1.0 (19 of them at 0.9, one at 0.2), α = 0.1: (1 + 1)/21 = 0.095 allows the one miss, so λ = 0.9."""
    scores = np.array([0.9] * 19 + [0.2])
    none = np.zeros(20, bool)
    assert cal.trigger_threshold(scores, none, 0.1) == pytest.approx(0.9)
    assert cal.trigger_threshold(scores, none, 0.06) == pytest.approx(0.2)
    caught = np.ones(20, bool)
    assert cal.trigger_threshold(scores, caught, 0.06) == 1.0, "what triggers anyway is never missed"


def test_uncovered_area_by_hand():
    """Unsafe pixels at heat 0.2 and 0.6: at level 0.5 half is uncovered, at 0.7 all, at 0.2 none."""
    heat, mask = np.array([[0.2, 0.6], [0.9, 0.9]]), np.array([[True, True], [False, False]])
    found = cal.uncovered(heat, mask)
    at = lambda level: found[round(level * 500)]  # noqa: E731
    assert at(0.2) == 0.0 and at(0.5) == 0.5 and at(0.7) == 1.0
    with pytest.raises(BadInput, match="empty"):
        cal.uncovered(heat, np.zeros((2, 2), bool))


@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.1, 0.2]))
@settings(max_examples=20, deadline=None)
def test_the_promise_holds_on_fresh_data(seed, alpha):
    """Over 200 random splits of any score distribution, the mean miss rate stays within α (and a little chance)."""
    rng = np.random.default_rng(seed)
    scores = rng.beta(*rng.uniform(0.5, 5, 2), size=400)
    losses = (scores[:, None] < cal.GRID[None]).astype(float)
    found = cal.check(losses, alpha, splits=200, seed=seed)
    assert found.mean <= alpha + 0.03 and found.splits == 200


def test_the_promise_is_not_idle():
    """A threshold that ignored the correction would break it for small n: here the mean risk is near α, not near 0."""
    scores = np.random.default_rng(0).uniform(size=4000)
    losses = (scores[:, None] < cal.GRID[None]).astype(float)
    assert 0.08 < cal.check(losses, 0.1).mean <= 0.1


def test_drift_is_noticed():
    rng = np.random.default_rng(0)
    reference = cal.Reference.of(rng.beta(2, 8, 2000))
    assert reference.drift(rng.beta(2, 8, 2000)) < 0.05 < 0.25 < reference.drift(rng.beta(5, 5, 500))


def test_many_equal_scores_do_not_break_the_reference():
    reference = cal.Reference.of(np.zeros(100))
    assert reference.drift(np.zeros(50)) < 0.05 < reference.drift(np.ones(50))
