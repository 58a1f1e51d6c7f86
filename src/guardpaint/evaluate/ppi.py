"""Prediction-powered inference: rates from many answers of a judge and a few labels by eye, with intervals.

`estimated_mean` is PPI++ (Angelopoulos, Duchi and Zrnic 2023) for a mean. `pooled_share` is its stratified form for
answers that are the same within a pool: what the judge says of a pool is replaced by what labels say of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from guardpaint.store.intervals import wilson

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float

    @property
    def ci(self) -> tuple[float, float]:
        return self.low, self.high


def tuned_power(labels: Sequence[float], guesses: Sequence[float], others: Sequence[float]) -> float:
    """λ̂ = cov(Y, f) / ((1 + n/N) var f), cut to [0, 1]: how much weight the guesses deserve (PPI++, Example 6.1).

    Labels 0, 1, guesses 0, 1, others 0, 1: cov = 1/4, var of 0, 1, 0, 1 = 1/3 and n/N = 1, so λ̂ = (1/4)/(2/3) = 3/8.
    """
    y, f, g = (np.asarray(x, float) for x in (labels, guesses, others))
    spread = float(np.var(np.concatenate([f, g]), ddof=1)) if len(f) + len(g) > 1 else 0.0
    if not spread:
        return 0.0
    shared = float(((y - y.mean()) * (f - f.mean())).mean())
    return min(1.0, max(0.0, shared / ((1 + len(f) / len(g)) * spread)))


def estimated_mean(
    labels: Sequence[float],
    guesses: Sequence[float],
    others: Sequence[float],
    power: float | None = None,
    level: float = LEVEL,
) -> Estimate:
    """θ̂ = λ·mean(f over others) + mean(Y − λf over labelled), with a normal interval (PPI++, Algorithm 1).

    `guesses` are the judge's of the labelled items, `others` those of all the rest. Power 1 is plain PPI, power 0 the
    mean of the labels, None the tuned power.

    Labels 1, 0, guesses 1, 1, others 1, 1, 0, 0, power 1: θ̂ = 1/2 + (0 − 1)/2 = 0; its variance is
    (1/4)/4 + (1/4)/2 = 3/16.
    """
    y, f, g = (np.asarray(x, float) for x in (labels, guesses, others))
    if not len(y) or len(y) != len(f) or not len(g):
        raise ValueError(f"{len(y)} labels, {len(f)} guesses of them, {len(g)} others: needs as many, and some of each")
    weight = tuned_power(labels, guesses, others) if power is None else power
    rest = y - weight * f
    value = float(weight * g.mean() + rest.mean())
    half = float(norm.ppf(0.5 + level / 2)) * math.sqrt(weight**2 * g.var() / len(g) + rest.var() / len(y))
    return Estimate(value, value - half, value + half)


@dataclass(frozen=True)
class Pool:
    """The pictures of a cell of which the judge says the same and that have the same status."""

    size: float
    """How many of the cell's pictures are in it."""
    share: float
    """Share of hits among its labels; the judge's own answer where there is no label."""
    labels: float
    """Effective number of its labels: 0 for none, infinity where the truth is known without looking."""


def weighted_share(hits: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Weighted share of hits, and Kish's effective number of labels (Σw)²/Σw²; (0, 0) without labels.

    Hits 1, 0 with weights 3, 1: share 3/4, (3 + 1)²/(9 + 1) = 1.6 labels.
    """
    w = np.asarray(weights, float)
    if not len(w):
        return 0.0, 0.0
    return float((w * np.asarray(hits, float)).sum() / w.sum()), float(w.sum() ** 2 / (w**2).sum())


def pooled_share(pools: Sequence[Pool], size: float | None = None, level: float = LEVEL) -> Estimate:
    """θ̂ = Σ w_h p_h over pools, with an interval for the rate behind the sample.

    Each p_h has its Wilson interval. They are combined by squares of distances (Zou and Donner 2008), together with the
    chance by which the sample has these pools: (Σ w_h p_h² − θ̂²)/N, taken from Wilson's interval of θ̂. `size`
    replaces N where the pictures are not independent.

    Two pools of 50, p = 1 without doubt and p = 0 without doubt: θ̂ = 1/2, and the interval is Wilson's of 50 in 100.
    """
    total = sum(p.size for p in pools)
    if not total:
        return Estimate(math.nan, 0.0, 1.0)
    weights = [p.size / total for p in pools]
    value = sum(w * p.share for w, p in zip(weights, pools, strict=True))
    between = max(0.0, sum(w * p.share**2 for w, p in zip(weights, pools, strict=True)) - value**2)
    below = above = 0.0
    for w, p in zip(weights, pools, strict=True):
        low, high = share_interval(p, level)
        below += (w * (p.share - low)) ** 2
        above += (w * (high - p.share)) ** 2
    if 0 < value < 1:
        n = total if size is None else size
        low, high = wilson(value * n, n, level)
        part = between / (value * (1 - value))
        below += part * (value - low) ** 2
        above += part * (high - value) ** 2
    return Estimate(value, max(0.0, value - math.sqrt(below)), min(1.0, value + math.sqrt(above)))


def share_interval(pool: Pool, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's interval of a pool's share of hits; everything is possible without a label."""
    if math.isinf(pool.labels):
        return pool.share, pool.share
    return wilson(pool.share * pool.labels, pool.labels, level) if pool.labels else (0.0, 1.0)
