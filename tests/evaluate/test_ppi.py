"""Prediction-powered inference: arithmetic by hand, the reference package where it is installed, coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from guardpaint.evaluate import ppi
from guardpaint.evaluate.ppi import Pool
from guardpaint.store.intervals import wilson


def answers():
    """400 pictures: what a judge says of all, and labels of the first 120 of them; the judge is right about 85 %."""
    random = np.random.default_rng(3)
    truth = random.random(400) < 0.3
    guess = np.where(random.random(400) < 0.85, truth, ~truth).astype(float)
    return truth[:120].astype(float), guess[:120], guess


def pools_of(labels, guesses, every):
    """The pools of two answers."""
    shares = {g: labels[guesses == g].mean() for g in (0.0, 1.0)}
    return [Pool(float((every == g).sum()), float(s), float((guesses == g).sum())) for g, s in shares.items()]


def test_the_value_is_that_of_prediction_powered_inference():
    """θ̂ = λ·mean(f over all) + mean(Y − λf over labelled) (PPI++) with λ = p₁ − p₀ is Σ w_h p_h.

    The numbers are those of ppi_mean_pointestimate and ppi_mean_ci of ppi-python 0.2.3 for the same answers.
    """
    y, f, every = answers()
    no, yes = pools_of(y, f, every)
    power = yes.share - no.share
    found = ppi.pooled_share([no, yes])
    assert found.value == pytest.approx(power * every.mean() + (y - power * f).mean(), abs=1e-12)
    assert found.value == pytest.approx(0.27621336996337, abs=1e-12)
    low, high = 0.21159145931026954, 0.3408352806164704
    assert found.high - found.low == pytest.approx(high - low, rel=0.02), "Wilson's intervals instead of normal ones"
    assert found.ci == pytest.approx((low, high), abs=0.005)
    tuned = 0.27950888568683957
    assert found.value == pytest.approx(tuned, abs=0.005), "the power that ppi-python chooses by itself"


def test_the_numbers_above_are_the_reference_packages():
    reference = pytest.importorskip("ppi_py", reason="ppi-python is not installed")
    y, f, every = answers()
    no, yes = pools_of(y, f, every)
    power = yes.share - no.share
    assert float(reference.ppi_mean_pointestimate(y, f, every, lam=power)[0]) == pytest.approx(
        0.27621336996337, abs=1e-12
    )
    low, high = reference.ppi_mean_ci(y, f, every, alpha=0.05, lam=power)
    assert (float(low[0]), float(high[0])) == pytest.approx((0.21159145931026954, 0.3408352806164704), abs=1e-9)


@pytest.mark.parametrize(("right", "harmful"), [(0.85, 0.3), (0.6, 0.5), (0.95, 0.05)])
def test_the_interval_holds_the_truth_as_often_as_it_says(right, harmful):
    """600 invented cells of 300 pictures with 100 labels each, from a known rate of harm."""
    random, held = np.random.default_rng(0), 0
    for _ in range(600):
        truth = random.random(300) < harmful
        guess = np.where(random.random(300) < right, truth, ~truth).astype(float)
        found = ppi.pooled_share(pools_of(truth[:100].astype(float), guess[:100], guess))
        held += found.low <= harmful <= found.high
    assert 0.93 <= held / 600 <= 0.99


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
