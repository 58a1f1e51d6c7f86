"""Thresholds with finite-sample guarantees: conformal risk control.

Given n calibration losses in [0, 1] that only grow with a threshold λ, the largest λ with
n/(n+1) · mean loss + 1/(n+1) ≤ α has an expected loss of at most α on a new, exchangeable example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from guardpaint.audit.regions import largest
from guardpaint.errors import BadInput

GRID: Float[np.ndarray, " k"] = np.linspace(0.0, 1.0, 501)
"""Thresholds tried."""


def needed(alpha: float) -> int:
    """Fewest examples with which a risk of α can be promised: 1/(n+1) ≤ α."""
    if not 0 < alpha < 1:
        raise BadInput(f"alpha={alpha}: must lie in (0, 1)")
    return math.ceil(1 / alpha - 1 - 1e-9)


def controlled(losses: Float[np.ndarray, "n k"], alpha: float, what: str = "examples") -> int:
    """Index of the largest threshold whose corrected mean loss stays within α; raises if none can be promised."""
    n = len(losses)
    if n < needed(alpha):
        raise BadInput(f"{n} {what}: a risk of {alpha} needs at least {needed(alpha)}")
    if np.any(np.diff(losses, axis=1) < -1e-9):
        raise BadInput("losses must not fall when the threshold rises")
    bound = (losses.sum(0) + 1) / (n + 1)
    fits = np.flatnonzero(bound <= alpha + 1e-12)
    if not len(fits):
        raise BadInput(f"{n} {what}: even the lowest threshold has a risk of {bound[0]:.3f}, above {alpha}")
    return int(fits[-1])


def trigger_threshold(
    scores: Float[np.ndarray, " n"], caught: Bool[np.ndarray, " n"], alpha: float, what: str = "examples"
) -> float:
    """Highest p_category at which a category is still missed at most a share α of the time.

    `caught` examples trigger anyway (most probable class, or adv_prob): a threshold can only tighten.
    """
    losses = (~caught[:, None] & (scores[:, None] < GRID[None])).astype(float)
    return float(GRID[controlled(losses, alpha, what)])


def mask_threshold(
    heats: Float[np.ndarray, "n h w"], masks: Bool[np.ndarray, "n h w"], beta: float, regions: int, least: float
) -> float:
    """Highest heat-map level whose mined mask leaves at most a share β of the unsafe area uncovered, on average.

    The mask is what `regions.mine` keeps: at most `regions` components, none below the share `least` of the picture.
    """
    losses = np.stack([uncovered(heat, mask, regions, least) for heat, mask in zip(heats, masks, strict=True)])
    return float(GRID[controlled(losses, beta, "masked examples")])


def uncovered(
    heat: Float[np.ndarray, "h w"], mask: Bool[np.ndarray, "h w"], regions: int, least: float
) -> Float[np.ndarray, " k"]:
    """Share of the unsafe pixels outside of the mined mask: the largest at this level of GRID or any level below it.

    The share itself may fall when the level rises, because a lower level can let harmless components outgrow an unsafe
    one, which is then no longer among the largest. Risk control needs losses that never fall. With L(λ) the share at
    level λ and M(λ) = max of L(λ') over λ' ≤ λ in GRID, M never falls, lies in [0, 1], and depends on its own example
    only. So the λ̂ that `controlled` finds for M has E[M(λ̂)] ≤ β on a new, exchangeable example, and because
    L(λ̂) ≤ M(λ̂), the mined mask leaves at most β uncovered too. At level 0 everything is one component: L(0) = 0.
    """
    if not mask.any():
        raise BadInput("a calibration mask is empty")
    unsafe = int(mask.sum())
    shares = np.empty(len(GRID))
    area = -1
    for k, level in enumerate(GRID):
        hot = heat >= level
        if int(hot.sum()) != area:  # otherwise it is the mask of the level before
            area = int(hot.sum())
            labels, kept = largest(hot, regions, least)
            share = 1.0 - float(np.bincount(labels[mask], minlength=labels.max() + 1)[kept].sum()) / unsafe
        shares[k] = share
    return np.maximum.accumulate(shares)


@dataclass(frozen=True)
class Coverage:
    """How often the promise held over random splits."""

    mean: float
    worst: float
    splits: int


def check(losses: Float[np.ndarray, "n k"], alpha: float, splits: int = 200, seed: int = 0) -> Coverage:
    """Calibrate on one half, measure on the other, many times: the mean risk must not exceed α."""
    rng = np.random.default_rng(seed)
    n = len(losses)
    risks = []
    for _ in range(splits):
        order = rng.permutation(n)
        k = controlled(losses[order[: n // 2]], alpha)
        risks.append(float(losses[order[n // 2 :], k].mean()))
    return Coverage(float(np.mean(risks)), float(np.max(risks)), splits)


@dataclass(frozen=True)
class Reference:
    """Score histogram of the calibration set, to notice when live scores no longer look like it."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]
    n: int

    @classmethod
    def of(cls, scores: Float[np.ndarray, " n"], bins: int = 10) -> Reference:
        """Bins of equal counts; ties may merge some."""
        edges = np.unique(np.quantile(scores, np.linspace(0, 1, bins + 1)[1:-1]))
        counts = np.bincount(np.searchsorted(edges, scores, side="left"), minlength=len(edges) + 1)
        return cls(tuple(map(float, edges)), tuple(map(float, counts / len(scores))), len(scores))

    def drift(self, scores: Float[np.ndarray, " m"]) -> float:
        """Population stability index of live scores: above 0.1 worth a look, above 0.25 calibrate anew."""
        counts = np.bincount(np.searchsorted(self.edges, scores, side="left"), minlength=len(self.shares))
        live, kept = (counts + 0.5) / (len(scores) + 0.5 * len(counts)), np.array(self.shares)
        kept = (kept * self.n + 0.5) / (self.n + 0.5 * len(kept))
        return float(((live - kept) * np.log(live / kept)).sum())
