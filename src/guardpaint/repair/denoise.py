"""Batched repair denoising: candidates of mixed inversion depths, each on a ladder of noise levels of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.repair.ladder import DEPTHS
from guardpaint.store.seeds import generator
from guardpaint.types import Knobs, Level

Ladder = Sequence[Level]
"""The levels of one candidate, from where it starts down to the clean one."""
Levels = Level | Sequence[Level]
"""One level for all latents of a call, or one for each."""
Estimate = Callable[[Tensor, Levels, Tensor], tuple[Tensor, Tensor]]
"""(latents of the active candidates, level, their indices) → (x̂0, ε̂)."""
Descent = Callable[[Tensor, Sequence[Ladder], Estimate], tuple[Tensor, Tensor]]
"""(latents, the ladder of each, estimate) → (clean latents to show, latents to go on from)."""


def starting_latent(
    z_view: Float[Tensor, "c h w"], mask: Float[Tensor, "h w"], knobs: Knobs, level: Level, seed: int
) -> Float[Tensor, "c h w"]:
    """A candidate noised to its depth's level; jitter adds noise inside its mask; depth 10 is pure noise."""
    g = generator(seed, knobs.seed_offset)
    noise = torch.randn(z_view.shape, generator=g).to(z_view)
    extra = torch.randn(z_view.shape, generator=g).to(z_view)
    signal = 0.0 if knobs.depth == DEPTHS else level.signal
    return signal * z_view + level.sigma * noise + knobs.jitter * mask * extra


def denoise(
    z: Float[Tensor, "n c h w"], ladders: Sequence[Ladder], estimate: Estimate
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
    """Deterministic DDIM down the ladders: a candidate with r steps joins when r are left, so they arrive together."""
    z = z.clone()
    left = torch.tensor([len(ladder) - 1 for ladder in ladders])
    for steps in range(int(left.max()), 0, -1):
        active = torch.nonzero(left >= steps)[:, 0]
        here = shared([ladders[i][-1 - steps] for i in active.tolist()])
        there = shared([ladders[i][-steps] for i in active.tolist()])
        active = active.to(z.device)
        z[active] = stepped(there, *estimate(z[active], here, active))
    return z, z


def first_steps(
    z: Float[Tensor, "n c h w"], ladders: Sequence[Ladder], estimate: Estimate
) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
    """Each candidate's clean estimate and latent after its first step; one denoiser call for those of equal length."""
    clean, after = torch.empty_like(z), torch.empty_like(z)
    length = torch.tensor([len(ladder) for ladder in ladders])
    for some in length.unique().tolist():
        active = torch.nonzero(length == some)[:, 0]
        here, there = (shared([ladders[i][k] for i in active.tolist()]) for k in (0, 1))
        active = active.to(z.device)
        x0, eps = estimate(z[active], here, active)
        clean[active], after[active] = x0, stepped(there, x0, eps)
    return clean, after


def shared(levels: Sequence[Level]) -> Levels:
    """The level that all latents are at, or the level of each."""
    return levels[0] if all(level == levels[0] for level in levels) else levels


def stepped(level: Levels, x0: Tensor, eps: Tensor) -> Tensor:
    """The latent at a level, from the two halves of an estimate."""
    if isinstance(level, Level):
        return level.signal * x0 + level.sigma * eps
    signal, sigma = (
        torch.tensor(v).view(-1, 1, 1, 1).to(x0) for v in zip(*((a.signal, a.sigma) for a in level), strict=True)
    )
    return signal * x0 + sigma * eps


def in_batches(count: int, size: int) -> list[slice]:
    """Slices of at most `size`."""
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
