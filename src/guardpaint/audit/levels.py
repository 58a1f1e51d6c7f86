"""Levels: from which raw score on a category counts as found.

Every detector has a scale of its own, so publishers name a threshold, and calibration finds another. A raw score r
with level l becomes p = sigmoid(logit(r) − logit(l)), which is 0.5 where r = l. With a policy trigger of 0.5 a picture
is then flagged exactly when the raw score of some category reaches its level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from guardpaint.errors import BadConfig, NotFinite
from guardpaint.types import SAFE, Audit

UNCHANGED = 0.5
"""The level at which raw scores stay what they are."""
LEAST = 1e-6
"""Levels lie between this and one minus this."""
Score = TypeVar("Score", float, Tensor)


def at_level(raw: Score, level: Any) -> Score:
    """sigmoid(logit(raw) − logit(level)), written with odds: 0.5 where raw equals level, finite at 0 and at 1.

    A tensor of scores may have a tensor of levels.
    """
    harm, harmless = raw * (1 - level), (1 - raw) * level
    return harm / (harm + harmless)


def probabilities(harms: Mapping[str, float]) -> dict[str, float]:
    """Probabilities that sum to one: p_safe = 1 − max p_c, and the harms share max p_c in proportion to their p_c."""
    worst, total = max(harms.values()), sum(harms.values())
    return {SAFE: 1 - worst, **{c: worst * p / total if total else 0.0 for c, p in harms.items()}}


def graded(raw: Mapping[str, float], levels: Mapping[str, float]) -> dict[str, float]:
    """Probabilities of `safe` and all harms from raw scores; a score that is no number in [0, 1] is an error."""
    wrong = {c: r for c, r in raw.items() if not 0 <= r <= 1}
    if wrong:
        raise NotFinite(f"raw scores {wrong}: a detector's scores must be numbers in [0, 1]")
    return probabilities({c: at_level(r, levels[c]) for c, r in raw.items()})


def harm_scores(probs: Mapping[str, float], unsafe: float | None = None) -> dict[str, float]:
    """The p_c of every harm: the inverse of `probabilities`. `unsafe` replaces 1 − p_safe as the largest of them."""
    unsafe = 1 - probs[SAFE] if unsafe is None else unsafe
    harms = {c: p for c, p in probs.items() if c != SAFE}
    most = max(harms.values())
    return {c: unsafe * p / most if most > 0 else unsafe for c, p in harms.items()}


def audit_scores(audit: Audit) -> dict[str, float]:
    """The p_c of every harm in any auditor's audit; the largest of them is 1 − S, with S = min(1 − adv_prob, p_safe).

    An auditor that states a higher S than that is not believed.
    """
    return harm_scores(audit.probs, max(1 - audit.safety, audit.adv_prob, 1 - audit.probs[SAFE]))


def checked_levels(levels: Mapping[str, float], categories: Sequence[str]) -> dict[str, float]:
    """A level for each harm among the categories; where none is given, the one that changes nothing."""
    harms = [c for c in categories if c != SAFE]
    unknown = sorted(set(levels) - set(harms))
    if unknown:
        raise BadConfig(f"levels for {', '.join(unknown)}: this part covers {', '.join(harms)}")
    for name, level in levels.items():
        if not LEAST <= level <= 1 - LEAST:
            raise BadConfig(f"level {name}={level}: must lie between {LEAST} and {1 - LEAST}")
    return {c: float(levels.get(c, UNCHANGED)) for c in harms}
