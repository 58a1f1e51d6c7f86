"""The noise levels that a repair goes down: one for every step of inversion depth, or few."""

from __future__ import annotations

from collections.abc import Callable

from guardpaint.types import Level

DEPTHS = 10
"""Inversion depth 10 starts from pure noise, depth d at d tenths of the noise time."""


def count_steps(depth: int, most: int) -> int:
    """Denoiser evaluations of a depth on a ladder that has `most` of them at depth 10: in proportion, at least one."""
    return max(1, (2 * depth * most + DEPTHS) // (2 * DEPTHS))


def own_ladder(depth: int, most: int, level: Callable[[float], Level]) -> list[Level]:
    """The levels from a depth's own noise time down to the clean one, evenly spaced, the noisiest first.

    However few the steps are, a depth keeps the level that it starts from, and with it how much of the view it keeps.
    """
    steps = count_steps(depth, most)
    return [level(depth * (steps - k) / (steps * DEPTHS)) for k in range(steps + 1)]
