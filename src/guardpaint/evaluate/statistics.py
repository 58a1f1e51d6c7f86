"""Confidence intervals and distances that results are reported with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import norm

from guardpaint.results import metric


def wilson(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson interval of a proportion."""
    if n == 0:
        return 0.0, 1.0
    z = float(norm.ppf(0.5 + level / 2))
    p = hits / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of a (weighted) mean, resampling whole items: 2,000 draws."""
    v = np.asarray(values, float)
    w = np.ones_like(v) if weights is None else np.asarray(weights, float)
    picks = np.random.default_rng(seed).integers(len(v), size=(2000, len(v)))
    means = (v * w)[picks].sum(1) / w[picks].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def share(hits: Sequence[bool], goal: str | None) -> dict[str, Any]:
    """A proportion as a reported metric."""
    n = len(hits)
    return metric(sum(hits) / n if n else None, n, goal=goal, ci=wilson(sum(hits), n))


def mean(values: Sequence[float], goal: str | None) -> dict[str, Any]:
    """A mean as a reported metric."""
    n = len(values)
    return metric(sum(values) / n if n else None, n, goal=goal, ci=bootstrap(values) if n else None)


def kid(a: Float[np.ndarray, "n d"], b: Float[np.ndarray, "m d"]) -> float:
    """Kernel distance of two samples of features: unbiased MMD² with the kernel (x·y/d + 1)³."""
    d = a.shape[1]
    aa, bb, ab = ((x @ y.T / d + 1) ** 3 for x, y in ((a, a), (b, b), (a, b)))
    n, m = len(a), len(b)
    within = (aa.sum() - np.trace(aa)) / (n * (n - 1)) + (bb.sum() - np.trace(bb)) / (m * (m - 1))
    return float(within - 2 * ab.mean())
