"""Bootstrap intervals of statistics that are no plain means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000


def interval(statistic: Callable[[np.ndarray], float], items: int) -> tuple[float, float]:
    """The 95 % bootstrap interval of a statistic of item numbers; draws that have no value are left out."""
    rng = np.random.default_rng(0)
    draws = [statistic(rng.integers(items, size=items)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return float(low), float(high)


def column(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """A column of numbers, which are text once they were read from a file."""
    return np.array([float(r[name]) for r in rows])
