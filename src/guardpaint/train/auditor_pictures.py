"""Augmentation of the auditor's training pictures: artefacts of known strength, colour and grain, mirroring."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from PIL import Image, ImageDraw
from torch import Tensor

FULL_STRENGTH = 0.12
"""An unsafe area of this share of the picture, or more, has strength 1."""
FULL_ARTEFACT = 0.3
"""A patch whose root mean square difference from what it covers is this or more is an artefact of strength 1."""


def strength_of(masks: Float[Tensor, "b h w"]) -> Float[Tensor, " b"]:
    """Relative adversary strength: square root of the unsafe share of the picture over FULL_STRENGTH, at most 1."""
    return (masks.mean((1, 2)) / FULL_STRENGTH).clamp(max=1).sqrt()


SIZE = 64
"""Side of a brush mask in pixels, unless another one is asked for."""


def brush(rng: random.Random, size: int = SIZE) -> Bool[np.ndarray, "s s"]:
    """A random mask of a few thick strokes; the same strokes at any size."""
    unit = size / SIZE
    image = Image.new("L", (size, size))
    draw = ImageDraw.Draw(image)
    x, y = rng.uniform(12, 52), rng.uniform(12, 52)
    for _ in range(rng.randint(2, 6)):
        to = (x + rng.gauss(0, 14), y + rng.gauss(0, 14))
        r = rng.uniform(4, 9)
        draw.line([(x * unit, y * unit), (to[0] * unit, to[1] * unit)], fill=255, width=int(2 * r * unit))
        around = (to[0] - r, to[1] - r, to[0] + r, to[1] + r)
        draw.ellipse([v * unit for v in around], fill=255)
        x, y = min(58.0, max(6.0, to[0])), min(58.0, max(6.0, to[1]))
    out = np.asarray(image) > 127
    return out if out.any() else ~out


def composites(
    images: Float[Tensor, "b 3 h w"], share: float, g: torch.Generator
) -> tuple[Float[Tensor, "b 3 h w"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Put a wrong patch into a random share of the pictures; returns pictures, quality, and 1 where labels still hold.

    The strength of an artefact is the change of what it covers, so blurring plain sky is no artefact. Pictures without
    one have quality 1. Patches of other pictures may add or hide unsafe content, so the safety label no longer holds.
    """
    out, n, size = images.clone(), len(images), (int(images.shape[-2]), int(images.shape[-1]))
    unit = max(1, min(size) // 64)
    quality, judged = torch.ones(n), torch.ones(n)
    for i in torch.nonzero(torch.rand(n, generator=g) < share)[:, 0].tolist():
        rng = random.Random(int(torch.randint(1 << 30, (1,), generator=g)))
        mask = F.interpolate(torch.from_numpy(brush(rng)).float()[None, None], size)[0, 0]
        kind, strength = rng.choice(("foreign", "blur", "cast", "noise", "shift")), rng.random()
        if kind == "foreign":
            wrong = images[rng.randrange(n)]
            judged[i] = 0.0
        elif kind == "blur":
            wrong = F.avg_pool2d(images[i][None], 8 * unit + 1, 1, 4 * unit, count_include_pad=False)[0]
        elif kind == "cast":
            wrong = (images[i] + 0.45 * torch.randn(3, 1, 1, generator=g)).clamp(0, 1)
        elif kind == "noise":
            wrong = (images[i] + 0.35 * torch.randn(images[i].shape, generator=g)).clamp(0, 1)
        else:
            wrong = images[i].roll((unit * rng.choice((-6, 6)), unit * rng.choice((-6, 6))), (1, 2))
        out[i] = images[i] + strength * mask * (wrong - images[i])
        change = ((out[i] - images[i]).square().mean(0) * mask).sum() / mask.sum().clamp(min=1)
        quality[i] = 1 - float((change.sqrt() / FULL_ARTEFACT).clamp(max=1))
    return out, quality, judged


def disturbed(images: Float[Tensor, "b 3 h w"], g: torch.Generator) -> Float[Tensor, "b 3 h w"]:
    """The pictures with slight random changes of exposure, colour cast and grain."""
    n = len(images)
    gain = 1 + 0.10 * torch.randn((n, 1, 1, 1), generator=g) + 0.04 * torch.randn((n, 3, 1, 1), generator=g)
    grain = 0.03 * torch.rand((n, 1, 1, 1), generator=g) * torch.randn(images.shape, generator=g)
    return (images * gain + grain).clamp(0, 1)


def flipped(g: torch.Generator, *pictures: Float[Tensor, "b ..."]) -> list[Float[Tensor, "b ..."]]:
    """The tensors with a random half of their rows mirrored, the same rows in each."""
    flip = torch.rand(len(pictures[0]), generator=g) < 0.5
    return [torch.where(flip.view(-1, *[1] * (p.dim() - 1)), p.flip(-1), p) for p in pictures]
