"""Seam quality Q: LPIPS restricted to a ring around the mask's boundary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from scipy import ndimage
from torch import Tensor

from guardpaint.audit.model import AuditorScorer
from guardpaint.errors import BadConfig
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.types import Auditor, JsonDict, SeamMetric
from guardpaint.verify.lpips import Lpips, LpipsAlex, LpipsVGG, spatial_distance

KAPPA = 5.0
RING = 8 / 512
"""r_ring as a fraction of the shorter side."""


def ring(mask: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
    """Dilate(m, r) − erode(m, r) with the paper's square element; at least one pixel wide."""
    hard = mask.numpy() > 0.5
    r = max(1, round(RING * min(mask.shape)))
    size = 2 * r + 1
    grown = ndimage.grey_dilation(hard.astype("uint8"), size=(size, size), mode="nearest")
    shrunk = ndimage.grey_erosion(hard.astype("uint8"), size=(size, size), mode="nearest")
    return torch.from_numpy(grown - shrunk).float()


def seam_quality(
    metric: SeamMetric,
    candidates: Float[Tensor, "n 3 h w"],
    control: Float[Tensor, "3 h w"],
    masks: Float[Tensor, "n h w"],
) -> Float[Tensor, " n"]:
    """Q = exp(−5 · mean ring LPIPS(C_i, C_0)); 1 where a mask has no boundary."""
    distance = metric.distance(candidates, control).cpu()
    rings = torch.stack([ring(m) for m in masks])
    area = rings.sum((1, 2))
    mean = (distance * rings).sum((1, 2)) / area.clamp_min(1.0)
    return torch.exp(-KAPPA * mean)


class BackboneSeam:
    """The LPIPS formula on unit features of the auditor's own backbone: no further weights."""

    name = "auditor_backbone"

    def __init__(self, auditor: AuditorScorer) -> None:
        self.auditor = auditor

    def remembering(self) -> AbstractContextManager[None]:
        """Within this block, pictures that the auditor has scored need no second pass."""
        return self.auditor.stages_seen.remembering()

    @torch.no_grad()
    def distance(self, candidates: Float[Tensor, "n 3 h w"], control: Float[Tensor, "3 h w"]) -> Float[Tensor, "n h w"]:
        device = self.auditor.device
        a, b = self.auditor.stages_of(candidates.to(device)), self.auditor.stages_of(control[None].to(device))
        size = (int(control.shape[-2]), int(control.shape[-1]))
        total = spatial_distance(a, b, [None] * len(a), size)
        return total / (2 * len(a))


class PixelSeam:
    """Plain colour distance; for detectors that have no features."""

    name = "pixels"
    kind: ClassVar[str] = "pixels"

    def options(self) -> JsonDict:
        return {}

    def save_pretrained(self, folder: Path) -> None:
        """Nothing: it has no files."""

    @classmethod
    def from_pretrained(cls, folder: Path) -> PixelSeam:
        return cls()

    def digest(self) -> str:
        return sha256_hex(self.kind)

    def distance(self, candidates: Float[Tensor, "n 3 h w"], control: Float[Tensor, "3 h w"]) -> Float[Tensor, "n h w"]:
        return ((candidates - control) ** 2).mean(1)


def own_seam(auditor: Auditor | None) -> SeamMetric:
    """The metric of a guard whose manifest names none: the auditor's backbone, or pixels if it has no features."""
    return BackboneSeam(auditor) if isinstance(auditor, AuditorScorer) else PixelSeam()


LPIPS: dict[str, type[Lpips]] = {"lpips_vgg": LpipsVGG, "lpips_alex": LpipsAlex}
SEAMS = "auditor_backbone, pixels, lpips_alex, lpips_alex:FILE or lpips_vgg:FILE"


def open_seam(name: str, auditor: Auditor | None) -> SeamMetric:
    """A seam metric by name; `FILE` holds LPIPS weights as safetensors."""
    kind, colon, file = name.partition(":")
    if kind in LPIPS and file:
        return LPIPS[kind].from_file(file)
    if kind == "auditor_backbone" and not isinstance(auditor, AuditorScorer):
        raise BadConfig(f"seam={name!r}: there is no auditor with a backbone; choose pixels or LPIPS")
    plain: dict[str, Callable[[], SeamMetric]] = {
        "auditor_backbone": lambda: own_seam(auditor),
        "pixels": PixelSeam,
        "lpips_alex": LpipsAlex.load,
    }
    if colon or kind not in plain:
        raise BadConfig(f"seam={name!r}: choose {SEAMS}")
    return plain[kind]()
