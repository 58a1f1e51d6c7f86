"""Synthetic pictures with the statistics of photographs: overlapping discs of all sizes ("dead leaves") with texture.

Edges, occlusion, smooth areas and detail at every scale are there without any photograph, the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

LEAVES = 250
"""Discs of one picture."""
SMALLEST, LARGEST = 0.03, 0.6
"""Radii of discs, as shares of the side."""


def noise(side: int, generator: torch.Generator) -> Float[Tensor, "3 s s"]:
    """Noise whose amplitude falls with frequency like that of photographs (1/f), with zero mean and unit variance."""
    down, across = torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)[None]
    spectrum = torch.fft.rfft2(torch.randn(3, side, side, generator=generator))
    values = torch.fft.irfft2(spectrum / (down**2 + across**2).sqrt().clamp_min(1 / side), s=(side, side))
    values = values.mean(0, keepdim=True) + 0.1 * values  # the channels of photographs are alike
    return (values - values.mean()) / values.std()


def leaves(side: int, generator: torch.Generator) -> Float[Tensor, "3 s s"]:
    """One picture of discs in front of each other, each with its own colour and texture."""
    rows, columns = torch.arange(side)[:, None], torch.arange(side)[None]
    textures = [noise(side, generator) for _ in range(3)]
    picture = (0.5 + 0.08 * textures[0]).clamp(0, 1)
    low, high = 1 / (LARGEST * side) ** 2, 1 / (SMALLEST * side) ** 2
    for _ in range(LEAVES):
        u = torch.rand(9, generator=generator).tolist()
        radius = 1 / math.sqrt(low + u[0] * (high - low))  # densities fall with the cube of the radius
        middle, grey = (u[1] * side, u[2] * side), u[3]
        colour = torch.tensor([grey + 0.35 * (c - 0.5) for c in u[4:7]]).clamp(0, 1).view(3, 1, 1)
        inside = (radius + 0.5 - torch.hypot(rows - middle[0], columns - middle[1])).clamp(0, 1)
        texture = textures[1 + int(u[7] < 0.5)]
        picture = torch.lerp(picture, colour + 0.06 * u[8] * texture, inside)
    return picture.clamp(0, 1)


def natural_pictures(count: int, side: int, seed: int = 0) -> Iterator[Float[Tensor, "3 s s"]]:
    """Synthetic pictures in [0, 1]; the same seed gives the same pictures."""
    for k in range(count):
        yield leaves(side, torch.Generator().manual_seed(seed * 1_000_003 + k))
