"""The reinsertion rules as functions of tensors. `level` is that of the edited latent, after the step."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.denoiser import Denoiser
from guardpaint.types import Edit, Level

INVERSION_STEPS = 10
NULL_TEXT_STEPS = 10
NULL_TEXT_LR = 0.01
LATE_FLOW = 0.25


def inside(
    z: Float[Tensor, "c h w"], value: Float[Tensor, "c h w"], weight: Float[Tensor, "h w"]
) -> Float[Tensor, "c h w"]:
    """Blend towards `value` by `weight`; where the weight is 0 the control is returned bit for bit."""
    return torch.where(weight > 0, torch.lerp(z, value, weight), z)


def ddpm_noise(z: Float[Tensor, "c h w"], edit: Edit, level: Level, g: torch.Generator) -> Float[Tensor, "c h w"]:
    """Fresh noise at the current level: a ẑ0 + s ε."""
    eps = torch.randn(z.shape, generator=g).to(z)
    return inside(z, level.signal * edit.z0 + level.sigma * eps, edit.mask)


def direct_blend(z: Float[Tensor, "c h w"], edit: Edit, level: Level, alpha: float) -> Float[Tensor, "c h w"]:
    """(1 − αm) z + αm ẑ0."""
    return inside(z, edit.z0, alpha * edit.mask)


def ddim_inversion(
    z: Float[Tensor, "c h w"], edit: Edit, level: Level, alpha: float, base: Denoiser
) -> Float[Tensor, "c h w"]:
    """Invert ẑ0 up to the current noise in 10 deterministic steps under the base's prompt, then blend."""
    current = edit.z0[None]
    for k in range(INVERSION_STEPS):
        here = base.level(level.noise * k / INVERSION_STEPS)
        there = base.level(level.noise * (k + 1) / INVERSION_STEPS)
        _, eps = base.estimate(current, here if here.sigma > 0 else there)
        x0 = (current - here.sigma * eps) / here.signal
        current = there.signal * x0 + there.sigma * eps
    scale = (level.signal**2 + level.sigma**2) ** 0.5
    return inside(z, current[0] * scale, alpha * edit.mask)


def null_text(
    z: Float[Tensor, "c h w"], edit: Edit, level: Level, base: Denoiser, start: Float[Tensor, "1 l d"] | None = None
) -> Float[Tensor, "1 l d"]:
    """The unconditional embedding under which the guided estimate from the live latent is ẑ0 inside m.

    The optimiser starts from `start`, such as the embedding of the step before, or from the base's own. It needs
    gradients inside of the pipeline's `no_grad`, or of the caller's `torch.inference_mode`, whose tensors autograd
    accepts as copies only.
    """
    with torch.inference_mode(False), torch.enable_grad():
        base = base.outside_inference()
        z, z0, mask = z.detach().clone(), edit.z0.clone(), edit.mask.clone()
        weight = mask / mask.sum().clamp_min(1e-12)
        first = base.null_states if start is None else start
        embedding = first.detach().float().clone().requires_grad_(True)
        optimiser = torch.optim.AdamW([embedding], lr=NULL_TEXT_LR)
        for _ in range(NULL_TEXT_STEPS):
            x0, _ = base.with_null_embedding(embedding).estimate(z[None], level)
            loss = ((x0[0] - z0) ** 2 * weight).sum()
            (embedding.grad,) = torch.autograd.grad(loss, embedding)
            optimiser.step()
    return embedding.detach()


def flow_ode(z: Float[Tensor, "c h w"], edit: Edit, level: Level, g: torch.Generator) -> Float[Tensor, "c h w"]:
    """(1 − σ) ẑ0 + σ ε; below σ = 0.25 the clean edit itself."""
    if level.sigma < LATE_FLOW:
        return inside(z, edit.z0, edit.mask)
    return ddpm_noise(z, edit, level, g)


def x0_substitution(
    z: Float[Tensor, "c h w"], edit: Edit, level: Level, eps: Float[Tensor, "c h w"]
) -> Float[Tensor, "c h w"]:
    """Keep the trajectory's own noise: rebuild the latent from (ẑ0, ε̂) at the next level."""
    return inside(z, level.signal * edit.z0 + level.sigma * eps, edit.mask)


def held_estimate(x0: Float[Tensor, "*s"], z0: Float[Tensor, "*s"], weight: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The hold: x̂0 inside m is kept at ẑ0 with weight h·m, in every remaining step."""
    return torch.where(weight > 0, torch.lerp(x0, z0, weight), x0)
