"""Batched repair denoising with mixed inversion depths on one shared ladder of noise levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.seeds import generator
from guardpaint.types import Knobs, Level

DEPTHS = 10
Estimate = Callable[[Tensor, Level, Tensor], tuple[Tensor, Tensor]]
"""(latents of the active candidates, level, their indices) → (x̂0, ε̂)."""


def starting_latents(
    z_view: Float[Tensor, "c h w"],
    masks: Float[Tensor, "n h w"],
    knobs: Sequence[Knobs],
    ladder: Sequence[Level],
    seed: int,
) -> Float[Tensor, "n c h w"]:
    """Each candidate noised to its own depth; jitter adds noise inside its mask; depth 10 is pure noise."""
    rows = []
    for mask, k in zip(masks, knobs, strict=True):
        g = generator(seed, k.seed_offset)
        noise = torch.randn(z_view.shape, generator=g).to(z_view)
        extra = torch.randn(z_view.shape, generator=g).to(z_view)
        level = ladder[k.depth]
        signal = 0.0 if k.depth == DEPTHS else level.signal
        rows.append(signal * z_view + level.sigma * noise + k.jitter * mask * extra)
    return torch.stack(rows)


def denoise(
    z: Float[Tensor, "n c h w"], knobs: Sequence[Knobs], ladder: Sequence[Level], estimate: Estimate
) -> Float[Tensor, "n c h w"]:
    """Deterministic DDIM down the ladder: a candidate of depth d joins at rung d, so one batch has one timestep."""
    z = z.clone()
    depths = torch.tensor([k.depth for k in knobs])
    for rung in range(int(depths.max()), 0, -1):
        active = torch.nonzero(depths >= rung)[:, 0].to(z.device)
        x0, eps = estimate(z[active], ladder[rung], active)
        z[active] = ladder[rung - 1].signal * x0 + ladder[rung - 1].sigma * eps
    return z


def first_estimates(
    z: Float[Tensor, "n c h w"], knobs: Sequence[Knobs], ladder: Sequence[Level], estimate: Estimate
) -> Float[Tensor, "n c h w"]:
    """Each candidate's clean estimate after the first of its steps; candidates of one depth share a call."""
    out = torch.empty_like(z)
    depths = torch.tensor([k.depth for k in knobs])
    for rung in depths.unique().tolist():
        active = torch.nonzero(depths == rung)[:, 0].to(z.device)
        out[active] = estimate(z[active], ladder[rung], active)[0]
    return out


Descent = Callable[[Tensor, Sequence[Knobs], Sequence[Level], Estimate], Tensor]


def in_batches(count: int, size: int) -> list[slice]:
    """Slices of at most `size`."""
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
