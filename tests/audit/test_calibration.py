"""Conformal risk control: by hand, as a property over random data, and the drift index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardpaint.audit import calibration as cal
from guardpaint.audit.regions import mine, union
from guardpaint.config import GuardConfig
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
    found = cal.uncovered(heat, mask, 3, 0.0)
    at = lambda level: found[round(level * 500)]  # noqa: E731
    assert at(0.2) == 0.0 and at(0.5) == 0.5 and at(0.7) == 1.0
    with pytest.raises(BadInput, match="empty"):
        cal.uncovered(heat, np.zeros((2, 2), bool), 3, 0.0)


def blobs(rng, unsafe_heat, harmless):
    """A 32×32 map with one unsafe 4×4 figure and a few larger, fainter harmless ones, each with its own heat."""
    heat, mask = np.full((32, 32), 0.01), np.zeros((32, 32), bool)
    heat[2:6, 2:6], mask[2:6, 2:6] = unsafe_heat, True
    for k in range(harmless):
        top, left = 9 + 8 * (k // 3), 1 + 10 * (k % 3)
        heat[top : top + 6, left : left + 6] = rng.uniform(0.1, 0.6)
    return heat, mask


def test_a_mined_mask_may_lose_what_a_lower_level_covers():
    """At 0.6 the figure is one of the largest three; at 0.2 three harmless components are larger; at 0 all is one."""
    heat, mask = blobs(np.random.default_rng(0), 0.9, 0)
    for k in range(3):
        heat[10:16, 1 + 10 * k : 7 + 10 * k] = 0.3
    config = GuardConfig(mask_threshold="calibrated", min_region=0.0)
    share = {}
    for level in (0.0, 0.2, 0.6, 0.95):
        regions = mine(torch.from_numpy(heat).float(), (32, 32), config.with_(mask_level=level))
        covered = union(regions).mask.numpy()[mask].mean() if regions else 0.0
        share[level] = 1 - float(covered)
    assert share == {0.0: 0.0, 0.2: 1.0, 0.6: 0.0, 0.95: 1.0}
    found = cal.uncovered(heat, mask, 3, 0.0)
    assert [found[round(level * 500)] for level in share] == [0.0, 1.0, 1.0, 1.0], "the running maximum"


def test_the_promise_of_the_mask_holds_for_what_is_mined():
    """Counting all pixels above the level promises what the three largest regions do not keep; mined masks keep it."""
    rng = np.random.default_rng(1)
    pairs = [blobs(rng, rng.uniform(0.3, 0.95), 5 if rng.random() < 0.3 else 1) for _ in range(400)]
    heats, masks = np.stack([h for h, _ in pairs]), np.stack([m for _, m in pairs])
    half, beta, config = 200, 0.1, GuardConfig(mask_threshold="calibrated", min_region=0.0)

    def left(level):
        """Share left uncovered by mining the other half at this level."""
        shares = []
        for heat, mask in zip(heats[half:], masks[half:], strict=True):
            regions = mine(torch.from_numpy(heat).float(), (32, 32), config.with_(mask_level=level))
            shares.append(1 - union(regions).mask.numpy()[mask].mean() if regions else 1.0)
        return float(np.mean(shares))

    every_pixel = np.stack([np.searchsorted(np.sort(h[m]), cal.GRID) / m.sum() for h, m in pairs[:half]])
    naive = float(cal.GRID[cal.controlled(every_pixel, beta)])
    mined = cal.mask_threshold(heats[:half], masks[:half], beta, config.regions, config.min_region)
    assert left(naive) > beta + 0.01 and left(mined) <= beta, (naive, left(naive), mined, left(mined))


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
