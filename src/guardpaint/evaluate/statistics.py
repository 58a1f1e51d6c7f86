"""Confidence intervals and distances that results are reported with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import t

from guardpaint.store.intervals import wilson as wilson
from guardpaint.store.results import metric

Groups = Sequence[Any] | None
"""The group of each item. Items of one group are not independent, so they are resampled together."""


def bootstrap(
    values: Sequence[float], weights: Sequence[float] | None = None, seed: int = 0, groups: Groups = None
) -> tuple[float, float]:
    """Percentile interval of a (weighted) mean, resampling whole items, or whole groups of them: 2,000 draws."""
    v = np.asarray(values, float)
    w = np.ones_like(v) if weights is None else np.asarray(weights, float)
    return ratio_interval(v * w, w, seed, groups)


def ratio_interval(
    over: Sequence[float] | np.ndarray, under: Sequence[float] | np.ndarray, seed: int = 0, groups: Groups = None
) -> tuple[float, float]:
    """Percentile interval of Σ over / Σ under, resampling items or groups; draws with Σ under = 0 are left out."""
    which = numbered(groups, len(over))
    a, b = (np.bincount(which, np.asarray(x, float)) for x in (over, under))
    picks = np.random.default_rng(seed).integers(len(a), size=(2000, len(a)))
    top, bottom = a[picks].sum(1), b[picks].sum(1)
    low, high = np.percentile(top[bottom > 0] / bottom[bottom > 0], [2.5, 97.5])
    return float(low), float(high)


def paired_interval(changes: Sequence[float], groups: Groups = None) -> tuple[float, float]:
    """Interval (95 %) of the mean of paired changes of a yes or no (−1, 0, 1): the wider end of two intervals.

    Agresti and Min's adds half a pair to each of the four outcomes, so that few equal pairs prove little;
    the bootstrap resamples groups, which several pairs may share.
    """
    v = np.asarray(changes, float)
    n = len(v) + 2
    mean, differ = float(v.sum()) / n, (float((v != 0).sum()) + 1) / n
    half = 1.96 * math.sqrt((differ - mean**2) / n)
    low, high = bootstrap(changes, groups=groups)
    return min(low, mean - half), max(high, mean + half)


def numbered(groups: Groups, n: int) -> Int[np.ndarray, " n"]:
    """The group of each item as a number from 0 on; without groups, every item is a group of its own."""
    return np.arange(n) if groups is None else np.unique([str(g) for g in groups], return_inverse=True)[1]


def effective(hits: Sequence[bool], groups: Groups) -> float:
    """Effective sample size of grouped items: n over the design effect, corrected for the small number of groups.

    If hits or misses occur in fewer than five groups, the design effect cannot be estimated, and the size is the number
    of groups.
    """
    n, which = len(hits), numbered(groups, len(hits))
    x = np.asarray(hits, float)
    p, count = x.mean(), int(which.max()) + 1
    if count == n:
        return float(n)
    if min(len(set(which[x == side])) for side in (0, 1)) < 5:
        return float(count)
    spread = (np.bincount(which, x - p) ** 2).sum() * count / (count - 1) / n**2
    fewer = (t.ppf(0.975, n - 1) / t.ppf(0.975, count - 1)) ** 2
    return float(min(n, fewer * n / max(1.0, spread / (p * (1 - p) / n))))


def share(hits: Sequence[bool], goal: str | None, groups: Groups = None) -> dict[str, Any]:
    """A proportion as a reported metric; its interval allows for groups, such as pictures of one scene."""
    n = len(hits)
    if not n:
        return metric(None, 0, goal=goal, ci=wilson(0, 0))
    m = n if groups is None else effective(hits, groups)
    return metric(sum(hits) / n, n, goal=goal, ci=wilson(sum(hits) / n * m, m))


def mean(values: Sequence[float], goal: str | None, groups: Groups = None) -> dict[str, Any]:
    """A mean as a reported metric."""
    n = len(values)
    return metric(sum(values) / n if n else None, n, goal=goal, ci=bootstrap(values, groups=groups) if n else None)


def agreement(
    rows: Sequence[Mapping[str, Any]], goal: str | None, names: Sequence[str] | None = None, by: str | None = None
) -> dict[str, Any]:
    """Share of requested attributes that are present, from the columns `right_NAME` of rows; `names` restricts them.

    The interval resamples whole prompts, or all rows that share the value of `by`.
    """
    used = [(r, checks) for r in rows if (checks := checked(r, names))]
    groups = None if by is None else [r[by] for r, _ in used]
    return agreed([checks for _, checks in used], goal, groups)


def agreed(checks: Sequence[Sequence[float]], goal: str | None, groups: Groups = None) -> dict[str, Any]:
    """Share of ones in lists of ones and zeros, one list for each picture, as a reported metric."""
    if not checks:
        return metric(None, 0, goal=goal)
    right, total = [sum(c) for c in checks], [float(len(c)) for c in checks]
    return metric(sum(right) / sum(total), len(checks), goal=goal, ci=ratio_interval(right, total, groups=groups))


def checked(row: Mapping[str, Any], names: Sequence[str] | None = None) -> list[float]:
    """1 or 0 for every requested attribute of a row; values may be text, as in rows from a CSV file."""
    keys = [k for k in row if k.startswith("right_")] if names is None else [f"right_{n}" for n in names]
    values = [row.get(k) for k in keys]
    return [float(v in (1, True, "1", "True")) for v in values if v not in ("", None)]


def kid(a: Float[np.ndarray, "n d"], b: Float[np.ndarray, "m d"]) -> float:
    """Kernel inception distance of two samples of features: unbiased MMD² with the kernel (x·y/d + 1)³."""
    a, b, d = a.astype(np.float64), b.astype(np.float64), a.shape[1]
    aa, bb, ab = ((x @ y.T / d + 1) ** 3 for x, y in ((a, a), (b, b), (a, b)))
    n, m = len(a), len(b)
    within = (aa.sum() - np.trace(aa)) / (n * (n - 1)) + (bb.sum() - np.trace(bb)) / (m * (m - 1))
    return float(within - 2 * ab.mean())
