"""Calibrated thresholds as data: what `guardpaint calibrate` found, per band of progress, and on which data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from guardpaint.errors import BadConfig


@dataclass(frozen=True)
class Band:
    """Thresholds from this progress on, until the next band begins."""

    start: float
    thresholds: Mapping[str, float]
    """Flag a category also when p_category reaches this; it can only tighten the policy."""
    mask_level: float | None
    """Heat-map level of the calibrated mask threshold; None: the configuration's."""
    n: Mapping[str, int]
    """Calibration examples per category."""

    def __post_init__(self) -> None:
        values = [*self.thresholds.values(), *([] if self.mask_level is None else [self.mask_level])]
        if not 0 <= self.start <= 1 or any(not 0 <= v <= 1 for v in values):
            raise BadConfig(f"calibration band {self}: start, thresholds and mask level lie in [0, 1]")


@dataclass(frozen=True)
class Calibration:
    """A promise and the data it rests on."""

    alpha: float
    """Miss rate per category, at most, on data like the calibration's."""
    beta: float
    """Share of unsafe area left uncovered, at most."""
    data: str
    """SHA-256 of the calibration rows."""
    bands: tuple[Band, ...]
    auditor: str = ""
    """Identity of the auditor it holds for; a guard with another one is not loaded. Empty: not told."""

    def __post_init__(self) -> None:
        starts = [b.start for b in self.bands]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise BadConfig(f"calibration bands start at {starts}: the first at 0, then rising")
        if not (0 < self.alpha < 1 and 0 < self.beta < 1):
            raise BadConfig(f"calibration alpha={self.alpha}, beta={self.beta}: must lie in (0, 1)")

    def at(self, progress: float) -> Band:
        """The band that holds at this progress."""
        return next(b for b in reversed(self.bands) if progress >= b.start)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bands": [asdict(b) for b in self.bands]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        try:
            return cls(**{**data, "bands": tuple(Band(**b) for b in data["bands"])})
        except (KeyError, TypeError) as error:
            raise BadConfig(f"calibration: {error}") from error
