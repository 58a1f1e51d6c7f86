"""Pictures of intermediate results, kept for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL import Image

SIDE = 96
"""Shorter side at which a blurred picture is shown."""
KEPT_SIDE = 24
"""Shorter side at which it is kept. It has three cells, so nothing is lost; a service keeps thousands of them."""


@dataclass
class Evidence:
    """A picture of an intermediate result; blurred unless the guard retains evidence."""

    step: int
    kind: str
    """`view`, `control`, `candidate K` (of the step's tournament K), or `why CATEGORY` (a Grad-CAM)."""
    index: int
    kept: Image.Image
    """The picture as it is kept: few pixels if it is blurred."""
    blurred: bool
    heat: Any = None
    """The heat map behind a control, [h, w] in [0, 1]."""

    @property
    def bytes(self) -> int:
        """Memory that the picture and the map take."""
        width, height = self.kept.size
        return 3 * width * height + (0 if self.heat is None else 4 * self.heat.numel())

    @property
    def image(self) -> Image.Image:
        """The picture at a size to look at."""
        least = min(self.kept.size)
        if not self.blurred or least >= SIDE:
            return self.kept
        width, height = (round(side * SIDE / least) for side in self.kept.size)
        return self.kept.resize((width, height), Image.Resampling.BILINEAR)
