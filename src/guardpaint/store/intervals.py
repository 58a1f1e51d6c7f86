"""Intervals of proportions, for reports of any part."""

from __future__ import annotations

from scipy.stats import norm


def wilson(hits: float, n: float, level: float = 0.95) -> tuple[float, float]:
    """Wilson interval of the proportion hits / n."""
    if n == 0:
        return 0.0, 1.0
    z = float(norm.ppf(0.5 + level / 2))
    p = hits / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return 0.0 if hits <= 0 else max(0.0, centre - half), 1.0 if hits >= n else min(1.0, centre + half)
