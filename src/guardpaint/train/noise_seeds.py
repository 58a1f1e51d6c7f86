"""Seeds of the noise in alignment: training, its held-out measurements and its figures never draw the same noise."""

from __future__ import annotations

from guardpaint.errors import BadConfig

SPAN = 1_000_003
"""Batches that one training seed has noise for; the noise of the next seed begins there."""
HELD_OUT = 1 << 62
"""First seed of the held-out measurements; every training seed is below."""
FIGURES = HELD_OUT + (1 << 61)
"""Seed of the figures' noise; every seed of the measurements is below."""


def check_range(seed: int, batches: int) -> None:
    """Raise BadConfig if a run of so many batches would leave the range of its seed."""
    if not 0 <= seed < HELD_OUT // SPAN or batches > SPAN:
        raise BadConfig(
            f"seed={seed} with {batches} batches: seeds are below {HELD_OUT // SPAN}, batches at most {SPAN}"
        )


def training(seed: int, batch: int) -> int:
    """The seed of one training batch."""
    return seed * SPAN + batch


def held_out(level: int) -> int:
    """The seed of the measurements at one timestep."""
    return HELD_OUT + level
