"""Noise levels and clean estimates: every scheduler as z = signal · x0 + sigma · ε."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.errors import UnsupportedScheduler
from guardpaint.types import Level

PARAMETRISATION = {
    "DDIMScheduler": "alphas",
    "DDPMScheduler": "alphas",
    "PNDMScheduler": "alphas",
    "DPMSolverMultistepScheduler": "sigmas_vp",
    "EulerDiscreteScheduler": "sigmas_ve",
    "EulerAncestralDiscreteScheduler": "sigmas_ve",
    "FlowMatchEulerDiscreteScheduler": "flow",
}


CLIPPING = {
    "clip_sample": ("DDIMScheduler", "DDPMScheduler"),
    "thresholding": ("DDIMScheduler", "DDPMScheduler", "DPMSolverMultistepScheduler"),
}
"""Settings that clip the clean estimate inside the scheduler, and the classes that heed them."""
MULTISTEP = ("PNDMScheduler", "DPMSolverMultistepScheduler")
ROUNDING = 1e-3
"""Differences below this share of σ are rounding, not noise."""


def sd_scheduler() -> Any:
    """DDIM on Stable Diffusion's noise schedule."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def kind_of(scheduler: Any) -> str:
    """The name of the supported class that a scheduler is or derives from; raises on one we do not know."""
    for cls in type(scheduler).__mro__:
        if cls.__name__ in PARAMETRISATION:
            return cls.__name__
    raise UnsupportedScheduler(
        f"{type(scheduler).__name__}: clean estimates are known for {', '.join(sorted(PARAMETRISATION))}; "
        "set pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config) or another of these"
    )


def parametrisation(scheduler: Any) -> str:
    """How the scheduler scales its latents; raises on one we do not know."""
    return PARAMETRISATION[kind_of(scheduler)]


def check(scheduler: Any) -> None:
    """Raise on a scheduler whose steps cannot be followed: an unknown one, or one that clips its clean estimates."""
    prediction_type(scheduler)
    kind, name = kind_of(scheduler), type(scheduler).__name__
    for setting, classes in CLIPPING.items():
        if kind in classes and scheduler.config.get(setting):
            raise UnsupportedScheduler(
                f"{name} with {setting}=True clips latents as if they were pixels, so a repair could not be held; "
                f"set pipe.scheduler = {name}.from_config(pipe.scheduler.config, {setting}=False)"
            )


def between(scheduler: Any) -> bool:
    """Whether the next step starts from an earlier latent than the one that the last step returned (PNDM)."""
    if kind_of(scheduler) != "PNDMScheduler" or scheduler.cur_sample is None:
        return False
    if scheduler.config.skip_prk_steps:
        return True
    return bool(scheduler.counter < len(scheduler.prk_timesteps) and scheduler.counter % 4)


def prediction_type(scheduler: Any) -> str:
    """epsilon, v_prediction, sample, or flow."""
    if parametrisation(scheduler) == "flow" or scheduler.config.get("prediction_type") == "flow_prediction":
        return "flow"
    kind: str = scheduler.config.prediction_type
    if kind not in ("epsilon", "v_prediction", "sample"):
        raise UnsupportedScheduler(f"prediction_type={kind!r}: known are epsilon, v_prediction, sample, flow")
    return kind


def split(
    output: Float[Tensor, ...], z: Float[Tensor, ...], level: Level, prediction: str
) -> tuple[Float[Tensor, ...], Float[Tensor, ...]]:
    """Clean estimate and implied noise (x̂0, ε̂) from a model output."""
    a, s = level.signal, level.sigma
    if prediction == "flow":
        return z - s * output, z + a * output
    if prediction == "epsilon":
        return (z - s * output) / a, output
    if prediction == "sample":
        return output, (z - a * output) / s
    scale = math.hypot(a, s)
    x0 = (a * z / scale - s * output) / scale
    return x0, (z - a * x0) / s


def join(x0: Float[Tensor, ...], z: Float[Tensor, ...], level: Level, prediction: str) -> Float[Tensor, ...]:
    """The model output that means this clean estimate; the inverse of `split` in x̂0."""
    a, s = level.signal, level.sigma
    if prediction == "flow":
        return (z - x0) / s
    if prediction == "epsilon":
        return (z - a * x0) / s
    if prediction == "sample":
        return x0
    scale = math.hypot(a, s)
    return (a * z / scale - scale * x0) / s


def level_at(scheduler: Any, noise: float) -> Level:
    """The level of a noise time on the model's own training schedule (VP, or flow)."""
    if prediction_type(scheduler) == "flow":
        return Level(1.0 - noise, noise, noise)
    if noise <= 0.0:
        return Level(1.0, 0.0, 0.0)
    last = len(scheduler.alphas_cumprod) - 1
    index = min(last, max(0, round(noise * scheduler.config.num_train_timesteps)))
    alpha = float(scheduler.alphas_cumprod[index])
    return Level(math.sqrt(alpha), math.sqrt(1.0 - alpha), index / scheduler.config.num_train_timesteps)


class Levels:
    """The noise levels one scheduler run walks through, by executed step."""

    def __init__(self, scheduler: Any, steps: int) -> None:
        check(scheduler)
        self.scheduler = scheduler
        self.steps = steps
        self.kind = parametrisation(scheduler)
        self.prediction = prediction_type(scheduler)
        self.offset: int | None = None

    def locate(self, timestep: Any) -> None:
        """Remember which entry of scheduler.timesteps the first executed step is."""
        if self.offset is not None:
            return
        times = self.scheduler.timesteps
        t = float(timestep)
        tail = len(times) - self.steps
        if 0 <= tail < len(times) and float(times[tail]) == t:
            self.offset = tail
            return
        hits = torch.nonzero(times.to(torch.float64).cpu() == t)
        self.offset = int(hits[0]) if len(hits) else 0

    def at(self, step: int) -> Level:
        """The level of the latent that enters this step; `steps` is the level after the last one."""
        index = (self.offset or 0) + step
        times = self.scheduler.timesteps
        train = self.scheduler.config.num_train_timesteps
        noise = float(times[index]) / train if index < len(times) else 0.0
        if self.kind == "alphas":
            if index < len(times):
                alpha = float(self.scheduler.alphas_cumprod[int(times[index])])
            else:
                alpha = float(vars(self.scheduler).get("final_alpha_cumprod", 1.0))
            return Level(math.sqrt(alpha), math.sqrt(1.0 - alpha), noise)
        sigma = float(self.scheduler.sigmas[index])
        if self.kind == "flow" or self.prediction == "flow":
            return Level(1.0 - sigma, sigma, sigma)
        if self.kind == "sigmas_ve":
            return Level(1.0, sigma, noise)
        scale = math.hypot(1.0, sigma)
        return Level(1.0 / scale, sigma / scale, noise)

    def noise_after(
        self, stepped: Float[Tensor, "*s"], x0: Float[Tensor, "*s"], eps: Float[Tensor, "*s"], after: Level
    ) -> Float[Tensor, "*s"]:
        """The noise in a latent after its step, z = signal · x̂0 + sigma · ε.

        A deterministic step keeps ε̂. A stochastic one (DDPM, ancestral, SDE, η > 0) puts fresh noise in its place,
        which is read from the latent. A deterministic multistep solver leaves the line from ε̂ to x̂0 without drawing
        anything, so it keeps ε̂ too.
        """
        kind = kind_of(self.scheduler)
        draws = kind not in MULTISTEP or self.scheduler.config.get("algorithm_type", "").startswith("sde")
        if not draws or after.sigma == 0:
            return eps
        left = stepped - after.signal * x0
        fresh = (left - after.sigma * eps).square().mean().sqrt() > ROUNDING * after.sigma
        return left / after.sigma if fresh else eps

    def edit_history(
        self, step: int, image: int, z0: Float[Tensor, "*s"], mask: Float[Tensor, "*s"], eps: Float[Tensor, "*s"]
    ) -> None:
        """After a step, make a multistep solver's past agree with the rebuilt trajectory (ẑ0, ε) inside the mask.

        Otherwise its old estimates would pull the edit back. Tensors are of one latent, as the pipeline holds it. PNDM
        keeps network outputs, so each entry becomes what the network would have said at that entry's own level.
        """
        scheduler, kind = self.scheduler, kind_of(self.scheduler)
        if kind == "PNDMScheduler":
            levels = [self.at(i) for i in self.kept(step)[-len(scheduler.ets) :]]
            values = [join(z0, v.signal * z0 + v.sigma * eps, v, self.prediction) for v in levels]
            entries = list(zip(scheduler.ets, values, strict=True))
        elif kind == "DPMSolverMultistepScheduler":
            value = z0 if scheduler.config.algorithm_type.endswith("++") else eps
            entries = [(past, value) for past in scheduler.model_outputs if past is not None]
        else:
            return
        for past, value in entries:
            old = past[image].float()
            past[image] = torch.where(mask > 0, torch.lerp(old, value, mask), old).to(past.dtype)

    def kept(self, step: int) -> list[int]:
        """The executed steps, up to this one, whose outputs PNDM adds to its history."""
        early = len(self.scheduler.prk_timesteps)
        if early:  # four calls make one Runge-Kutta step, of which the first is kept
            return [*range(0, min(early, step + 1), 4), *range(early, step + 1)]
        return [0, *range(2, step + 1)]
