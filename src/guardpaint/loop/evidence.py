"""Pictures of intermediate results, kept for the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL import Image


@dataclass
class Evidence:
    """A picture of an intermediate result; blurred unless the guard retains evidence."""

    step: int
    kind: str
    """`view`, `control`, `candidate K` (of the step's tournament K), or `why CATEGORY` (a Grad-CAM)."""
    index: int
    image: Image.Image
    blurred: bool
    heat: Any = None
    """The heat map behind a control, [h, w] in [0, 1]."""
