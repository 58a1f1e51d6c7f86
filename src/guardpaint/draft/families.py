"""The families GuardPaint knows."""

from __future__ import annotations

from typing import Any

from guardpaint.draft.family import Family
from guardpaint.draft.flux import Flux
from guardpaint.draft.sd import SD
from guardpaint.draft.sd3 import SD3
from guardpaint.draft.sdxl import SDXL
from guardpaint.errors import UnsupportedPipeline

FAMILIES: tuple[Family, ...] = (SD(), SDXL(), SD3(), Flux())


def family_of(pipe: Any) -> Family:
    """The family of a pipeline, by class (or a base class's) name; raises and names the supported ones."""
    names = [cls.__name__ for cls in type(pipe).__mro__]
    for name in names:
        for family in FAMILIES:
            if name in family.pipelines:
                return family
    supported = "; ".join(f"{f.name}: {', '.join(f.pipelines)}" for f in FAMILIES)
    raise UnsupportedPipeline(f"{names[0]} cannot be guarded. Supported pipelines: {supported}")
