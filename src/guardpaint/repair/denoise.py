"""Batched repair denoising with mixed inversion depths on one shared ladder of noise levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.store.seeds import generator
from guardpaint.types import Knobs, Level, RepairRequest

DEPTHS = 10


def first_rung(depth: int, rungs: int = DEPTHS) -> int:
    """Where a depth of 10 begins on a ladder of so many steps: depth d of 10 takes d tenths of them, at least one."""
    return max(1, depth * rungs // DEPTHS)


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
        level = ladder[first_rung(k.depth, len(ladder) - 1)]
        signal = 0.0 if k.depth == DEPTHS else level.signal
        rows.append(signal * z_view + level.sigma * noise + k.jitter * mask * extra)
    return torch.stack(rows)


Descent = Callable[[Tensor, Sequence[int], Sequence[Level], Estimate], tuple[Tensor, Tensor]]
"""(latents, the rung each stands on, ladder, estimate) → (clean latents to show, latents to go on from)."""


def denoise(
    z: Float[Tensor, "n c h w"], rungs: Sequence[int], ladder: Sequence[Level], estimate: Estimate
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
    """Deterministic DDIM down the ladder: a candidate on rung r joins there, so one batch has one timestep."""
    z = z.clone()
    joins = torch.tensor(rungs)
    for rung in range(max(rungs), 0, -1):
        active = torch.nonzero(joins >= rung)[:, 0].to(z.device)
        z[active] = stepped(ladder[rung - 1], *estimate(z[active], ladder[rung], active))
    return z, z


def first_steps(
    z: Float[Tensor, "n c h w"], rungs: Sequence[int], ladder: Sequence[Level], estimate: Estimate
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
    """Each candidate's clean estimate and latent after its first step; one denoiser call per rung."""
    clean, after = torch.empty_like(z), torch.empty_like(z)
    joins = torch.tensor(rungs)
    for rung in joins.unique().tolist():
        active = torch.nonzero(joins == rung)[:, 0].to(z.device)
        x0, eps = estimate(z[active], ladder[rung], active)
        clean[active], after[active] = x0, stepped(ladder[rung - 1], x0, eps)
    return clean, after


def stepped(level: Level, x0: Tensor, eps: Tensor) -> Tensor:
    """The latent at a level, from the two halves of an estimate."""
    return level.signal * x0 + level.sigma * eps


def begin(
    z_view: Float[Tensor, "c h w"],
    masks: Float[Tensor, "n h w"],
    request: RepairRequest,
    part: slice,
    ladder: Sequence[Level],
) -> tuple[Float[Tensor, "n c h w"], list[int]]:
    """The latents and rungs that some candidates start from: their depths, or one rung lower if previewed."""
    knobs = request.knobs[part]
    rungs = [first_rung(k.depth, len(ladder) - 1) for k in knobs]
    if request.begun is not None:
        return request.begun[part], [r - 1 for r in rungs]
    return starting_latents(z_view, masks, knobs, ladder, request.seed), rungs


def in_batches(count: int, size: int) -> list[slice]:
    """Slices of at most `size`."""
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
