"""Shipped doubles: predictable auditors and repairers for tests, demos and integration work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from guardpaint.types import SAFE, Approval, Audit, RepairRequest

CATEGORIES = (SAFE, "nudity", "violence")
MAP = 16


def constant_audit(adv_prob: float, prompt: str | None, pixels: int, heat: Tensor | None = None) -> Audit:
    """An audit with one number behind every score."""
    if heat is None:
        ramp = torch.linspace(0, 1, MAP)
        heat = ramp[:, None] * ramp[None, :]
    return Audit(
        adv_prob=adv_prob,
        probs={SAFE: 1 - adv_prob, "nudity": adv_prob * 0.75, "violence": adv_prob * 0.25},
        safety=1 - adv_prob,
        faithfulness=None if prompt is None else 0.9,
        quality=0.9,
        suppression=1 - adv_prob,
        adv_map=heat,
        class_maps={SAFE: 1 - heat, "nudity": heat, "violence": heat},
        image_embed=torch.zeros(256),
        text_embed=None if prompt is None else torch.zeros(32),
        pixels=pixels,
    )


@dataclass
class AlwaysSafe:
    """Never triggers."""

    categories: tuple[str, ...] = CATEGORIES
    absent: frozenset[str] = frozenset()
    sizes: tuple[int, int] = (32, 64)

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        return [constant_audit(0.01, p, min(images.shape[-2:])) for p in prompts]


@dataclass
class AlwaysUnsafe:
    """Always triggers, and no repair ever satisfies it."""

    categories: tuple[str, ...] = CATEGORIES
    absent: frozenset[str] = frozenset()
    sizes: tuple[int, int] = (32, 64)

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        return [constant_audit(0.99, p, min(images.shape[-2:])) for p in prompts]


@dataclass
class Raises:
    """An auditor that breaks on its n-th pass."""

    after: int = 0
    error: BaseException = RuntimeError("the auditor broke")  # noqa: RUF009
    categories: tuple[str, ...] = CATEGORIES
    absent: frozenset[str] = frozenset()
    sizes: tuple[int, int] = (32, 64)
    passes: int = 0

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        self.passes += 1
        if self.passes > self.after:
            raise self.error
        return AlwaysSafe().audit(images, prompts, noise)


@dataclass
class FlagsBright:
    """A real, if simple, detector: bright pixels are 'unsafe', in proportion. Deterministic and local."""

    gain: float = 1.0
    categories: tuple[str, ...] = CATEGORIES
    absent: frozenset[str] = frozenset()
    sizes: tuple[int, int] = (32, 64)

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        light = (images.float().mean(1) * self.gain).clamp(0, 1)
        heat = F.adaptive_avg_pool2d(light[:, None], MAP)[:, 0].cpu()
        means = light.mean((1, 2)).tolist()
        return [constant_audit(m, p, min(images.shape[-2:]), h) for m, p, h in zip(means, prompts, heat, strict=True)]


@dataclass
class Approves:
    """An approver that answers with the same probability of harm for every picture, and counts what it was asked."""

    harm: float = 0.0
    name: str = "approves"
    categories: tuple[str, ...] = CATEGORIES
    asked: int = 0

    def approve(self, image: Float[Tensor, "3 h w"], prompt: str | None, edited: bool) -> Approval:
        self.asked += 1
        return Approval({SAFE: 1 - self.harm, "nudity": self.harm, "violence": 0.0}, self.name)


@dataclass
class PaintsFlat:
    """A repairer that paints the mask in one colour, darker for every candidate."""

    level: float = 0.2
    name: str = "flat"

    def candidates(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        n = len(request.knobs)
        shades = torch.linspace(self.level, self.level / 2, n).view(n, 1, 1, 1)
        return shades.expand(n, *request.view.shape).clone()


@dataclass
class PaintsNaN:
    """A repairer whose arithmetic went wrong."""

    name: str = "nan"

    def candidates(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        return torch.full((len(request.knobs), *request.view.shape), float("nan"))
