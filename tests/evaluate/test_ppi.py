"""Prediction-powered inference: arithmetic by hand, the reference package where it is installed, coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from guardpaint.evaluate import ppi
from guardpaint.evaluate.ppi import Pool
from guardpaint.store.intervals import wilson


def test_the_tuned_power_is_as_worked_out_by_hand():
    assert ppi.tuned_power([0, 1], [0, 1], [0, 1]) == pytest.approx(3 / 8)
    assert ppi.tuned_power([0, 1], [1, 0], [0, 1]) == 0.0, "guesses that contradict the labels get no weight"
    assert ppi.tuned_power([0, 1], [1, 1], [1, 1]) == 0.0, "guesses that are all the same tell nothing"


def test_the_mean_is_as_worked_out_by_hand():
    found = ppi.estimated_mean([1, 0], [1, 1], [1, 1, 0, 0], power=1)
    half = 1.959964 * math.sqrt(3 / 16)
    assert found.value == 0 and found.ci == pytest.approx((-half, half), abs=1e-5)
    classical = ppi.estimated_mean([1, 0], [1, 1], [1, 1, 0, 0], power=0)
    assert classical.value == 0.5 and classical.high == pytest.approx(0.5 + 1.959964 * math.sqrt(1 / 8), abs=1e-5)
    with pytest.raises(ValueError, match="0 labels"):
        ppi.estimated_mean([], [], [1])


def test_the_mean_is_that_of_the_reference_package():
    reference = pytest.importorskip("ppi_py", reason="ppi-python is not installed")
    random = np.random.default_rng(3)
    truth = random.random(400) < 0.3
    guess = np.where(random.random(400) < 0.85, truth, ~truth).astype(float)
    y, f, g = truth[:60].astype(float), guess[:60], guess[60:]
    for power in (None, 0, 0.5, 1):
        low, high = reference.ppi_mean_ci(y, f, g, alpha=0.05, lam=power)
        assert ppi.estimated_mean(y, f, g, power).ci == pytest.approx((float(low[0]), float(high[0])), abs=1e-9)


def test_weights_cost_labels():
    assert ppi.weighted_share([1, 0], [3, 1]) == pytest.approx((0.75, 1.6))
    assert ppi.weighted_share([1, 0], [2, 2]) == pytest.approx((0.5, 2))
    assert ppi.weighted_share([], []) == (0.0, 0.0)


def test_pools_without_doubt_have_the_plain_interval():
    sure = ppi.pooled_share([Pool(50, 1.0, math.inf), Pool(50, 0.0, math.inf)])
    assert sure.value == 0.5 and sure.ci == pytest.approx(wilson(50, 100))
    fewer = ppi.pooled_share([Pool(50, 1.0, math.inf), Pool(50, 0.0, math.inf)], size=20)
    assert fewer.ci == pytest.approx(wilson(10, 20)), "pictures of few scenes"


def test_labels_replace_what_the_judge_says():
    """The judge calls 40 of 100 unsafe; 8 of 10 labels agree, and 1 of 20 of the others is harm that it missed."""
    found = ppi.pooled_share([Pool(40, 0.8, 10), Pool(60, 0.05, 20)])
    assert found.value == pytest.approx(0.4 * 0.8 + 0.6 * 0.05)
    low, high = wilson(8, 10)[0], wilson(1, 20)[1]
    between = 0.4 * 0.64 + 0.6 * 0.0025 - 0.35**2
    part = between / (0.35 * 0.65)
    assert found.high > 0.35 + 0.6 * (high - 0.05) and found.low < 0.35 - 0.4 * (0.8 - low)
    below = (0.4 * (0.8 - low)) ** 2 + (0.6 * (0.05 - wilson(1, 20)[0])) ** 2 + part * (0.35 - wilson(35, 100)[0]) ** 2
    assert found.low == pytest.approx(0.35 - math.sqrt(below))


def test_a_pool_without_labels_leaves_everything_open():
    found = ppi.pooled_share([Pool(10, 1.0, 0), Pool(90, 0.0, math.inf)])
    assert found.value == pytest.approx(0.1) and found.low < 0.01 and found.high > 0.1
    assert math.isnan(ppi.pooled_share([]).value)
