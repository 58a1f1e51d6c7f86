"""A denoiser that knows the clean latent, to check the arithmetic of the loop to float precision.

`perfect(pipe, clean)` makes a pipeline's denoiser answer exactly what leads to `clean`, in the scheduler's own
parametrisation. Everything else is real: the pipeline, its scheduler, the tap and the guarded call. With it, the clean
estimate of every step, the latent of an early stop, a reinserted repair and a held repair are known beforehand.

    metrics, rows = measured()      # the largest error of each supported scheduler, over its families
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.config import GuardConfig
from guardpaint.draft import schedule
from guardpaint.draft.families import family_of
from guardpaint.draft.tap import tapped
from guardpaint.guard import GuardPaint
from guardpaint.loop.call import CallSetup, GuardedCall
from guardpaint.loop.release import clean_latent
from guardpaint.reinsert.apply import reinsert
from guardpaint.store.results import metric
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat
from guardpaint.types import Edit

GRID = small.PIXELS // 4
NEVER = 10**9
"""A step that no call reaches."""
TOLERANCE = 1e-4
"""Largest error that rounding explains: latents have a spread of 1 to 15, and 1/signal is at most 15."""


@dataclass(frozen=True)
class Sampler:
    """A scheduler with settings, and the arguments of the pipeline's call that it needs."""

    scheduler: str
    config: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    families: tuple[str, ...] = ("sd", "sdxl")
    draws: bool = False
    """Whether its steps add fresh noise."""
    drifts: bool = False
    """Whether it ends away from the clean latent without a guard too; `own_errors` measures how far."""


ENDS_CLEAN = {"set_alpha_to_one": True}
V = {"prediction_type": "v_prediction"}
SAMPLERS: dict[str, Sampler] = {
    "ddim": Sampler("DDIMScheduler", ENDS_CLEAN),
    "ddim_v": Sampler("DDIMScheduler", {**ENDS_CLEAN, **V}),
    "ddim_eta": Sampler("DDIMScheduler", ENDS_CLEAN, {"eta": 0.8}, draws=True),
    "ddpm": Sampler("DDPMScheduler", {"clip_sample": False}, draws=True),
    "ddpm_v": Sampler("DDPMScheduler", {"clip_sample": False, **V}, draws=True),
    "pndm": Sampler("PNDMScheduler", {**ENDS_CLEAN, "skip_prk_steps": True}),
    # PNDM averages velocities of several levels, which differ even if the denoiser is perfect
    "pndm_v": Sampler("PNDMScheduler", {**ENDS_CLEAN, "skip_prk_steps": True, **V}, drifts=True),
    "pndm_prk": Sampler("PNDMScheduler", {**ENDS_CLEAN, "skip_prk_steps": False}),
    "euler": Sampler("EulerDiscreteScheduler"),
    "euler_v": Sampler("EulerDiscreteScheduler", V),
    "euler_ancestral": Sampler("EulerAncestralDiscreteScheduler", draws=True),
    "dpmpp_2m": Sampler("DPMSolverMultistepScheduler"),
    "dpmpp_2m_v": Sampler("DPMSolverMultistepScheduler", V),
    "dpmpp_3m": Sampler("DPMSolverMultistepScheduler", {"solver_order": 3}),
    "dpmpp_2m_sde": Sampler("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, draws=True),
    "flow_euler": Sampler("FlowMatchEulerDiscreteScheduler", families=("sd3", "flux")),
    "flow_euler_stochastic": Sampler(
        "FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, families=("sd3", "flux"), draws=True
    ),
}


def perfect(pipe: Any, clean: Float[Tensor, "b c h w"]) -> Any:
    """Give the pipeline a denoiser that answers exactly what leads to `clean`, image by image; returns the pipeline.

    Its class is a subclass of the real one that overrides `forward`; the weights are not used.
    """
    family = family_of(pipe)
    module = copy.copy(getattr(pipe, family.denoiser))
    scheduler, target = pipe.scheduler, family.pack(clean)

    def answer(z: Tensor, time: Tensor) -> Tensor:
        x0 = target.to(z).repeat(len(z) // len(target), *[1] * (z.dim() - 1))
        shape = (-1, *[1] * (z.dim() - 1))
        if schedule.prediction_type(scheduler) == "flow":
            return (z - x0) / time.to(z).view(shape)
        sigma = sigma_of(scheduler, time).to(z).view(shape)
        signal = (1 + sigma**2) ** -0.5
        eps = (z - signal * x0) / (signal * sigma)
        return eps if scheduler.config.prediction_type == "epsilon" else signal * eps - signal * sigma * x0

    def unet(self: Any, sample: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        z = sample[:, : target.shape[1]]
        return (answer(z, torch.as_tensor(timestep).expand(len(z))),)

    def transformer(self: Any, *, hidden_states: Tensor, timestep: Tensor, **kwargs: Any) -> tuple[Tensor]:
        share = timestep if family.name == "flux" else timestep / scheduler.config.num_train_timesteps
        return (answer(hidden_states, share),)

    forward = unet if family.denoiser == "unet" else transformer
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    setattr(pipe, family.denoiser, module)
    return pipe


def sigma_of(scheduler: Any, time: Tensor) -> Float[Tensor, " n"]:
    """σ over clean latents at training times, whole or between two, as diffusers interpolates it."""
    alphas = scheduler.alphas_cumprod.double().numpy()
    sigmas = ((1 - alphas) / alphas) ** 0.5
    return torch.from_numpy(np.interp(time.double().cpu().numpy(), np.arange(len(sigmas)), sigmas))


def pipeline(sampler: Sampler, family: str, clean: Float[Tensor, "b c h w"]) -> Any:
    """A small pipeline of a family with this sampler and a perfect denoiser."""
    import diffusers

    pipe = small.pipeline(family)
    pipe.scheduler = getattr(diffusers, sampler.scheduler).from_config(pipe.scheduler.config, **sampler.config)
    return perfect(pipe, clean)


def latents(family: str, count: int, seed: int) -> Float[Tensor, "b c h w"]:
    """Clean latents of spread 1, of the family's shape."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, small.LATENT_CHANNELS[family], GRID, GRID, generator=g)


def feathered(edge: int = 4) -> Float[Tensor, "h w"]:
    """A mask that rises from 0 to 1 over `edge` columns and is 0 on the left third."""
    return ((torch.arange(GRID) - GRID // 3).float() / edge).clamp(0, 1).expand(GRID, GRID).clone()


class Checked(GuardedCall):
    """A guarded call that checks every step against what a perfect denoiser must give, and makes one repair itself."""

    def __init__(self, setup: CallSetup, prompts: list[str], clean: Float[Tensor, "b c h w"], edit_at: int) -> None:
        super().__init__(setup, prompts)
        self.clean, self.edit_at = clean, edit_at
        """The clean latents, and the first step after which the repair is put in."""
        self.edit = Edit(latents(setup.family.name, 1, 77)[0], feathered())
        self.errors: dict[str, float] = {}
        self.spreads: dict[str, list[float]] = {"outside": [], "feather": [], "inside": []}
        """Spread of the noise that each latent holds after the repair's step, by place; 1 is right."""

    @torch.no_grad()
    def guard_step(self, step: int, stepped: Tensor, only: Collection[int] | None = None) -> Tensor:
        drafts = self.drafts(step)
        self.state.audited.add(step)
        for i, draft in enumerate(drafts):
            want = torch.lerp(self.clean[i], self.edit.z0, self.edit.mask) if self.state.holds else self.clean[i]
            self.note("x0", draft.x0, want)
            if draft.after.noise > 0:
                self.note("early_stop", clean_latent(self, draft.latent, draft), want)
        if step < self.edit_at or self.state.holds:
            return stepped
        new = stepped.clone()
        for i, draft in enumerate(drafts):
            done = reinsert("held_substitution", draft, self.edit, self.setup.family, hold=1.0, alpha=1.0, seed=0)
            want = torch.lerp(self.clean[i], self.edit.z0, self.edit.mask)
            self.note("reinserted", clean_latent(self, done.latent, draft), want)
            if draft.after.sigma > 0:
                self.spread((done.latent - draft.after.signal * want) / draft.after.sigma)
            new[i] = self.accept(i, done, self.edit, draft).to(new.dtype)
        return new

    def note(self, what: str, mine: Tensor, want: Tensor) -> None:
        """Keep the largest error of one quantity."""
        self.errors[what] = max(self.errors.get(what, 0.0), float((mine - want).abs().max()))

    def spread(self, noise: Float[Tensor, "c h w"]) -> None:
        mask = self.edit.mask
        places = {"outside": mask == 0, "feather": (mask > 0) & (mask < 1), "inside": mask == 1}
        for place, where in places.items():
            self.spreads[place].append(float(noise[:, where].square().mean().sqrt()))


@dataclass(frozen=True)
class Checks:
    """What a checked run measured."""

    errors: dict[str, float]
    """Largest error of x0, early_stop, reinserted and held (the final latent)."""
    spreads: dict[str, float]
    audited: tuple[int, ...]


def checked(name: str, family: str, steps: int = 10, edit_at: int = 5, seed: int = 3, **settings: Any) -> Checks:
    """Run one sampler on one family with a perfect denoiser, two images and one repair that is held to the end."""
    sampler = SAMPLERS[name]
    clean = latents(family, 2, seed)
    pipe = pipeline(sampler, family, clean)
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), config=GuardConfig(audits=999, audit_start=0.0, on_error="raise"))
    opened = guard.open(pipe, door="watch", prompts=["", ""], seeds=lambda i, n: (0, i))
    run = Checked(opened.setup, ["", ""], clean, edit_at)
    call = {"num_inference_steps": steps, "height": small.PIXELS, "width": small.PIXELS, **sampler.call, **settings}
    with small.seeded(seed), tapped(pipe, run.setup.family, run):
        generator = torch.Generator().manual_seed(seed)
        out = pipe(["", ""], generator=generator, output_type="latent", **call).images
    family_ = run.setup.family
    final = family_.unpack(out, (GRID, GRID))
    drafts = run.drafts(run.state.index - 1)
    for i, draft in enumerate(drafts):
        mask = run.edit.mask
        mine = clean_latent(run, final[i], draft)
        want = torch.lerp(clean[i], run.edit.z0, mask) if run.state.holds else clean[i]
        run.note("held", mine[:, mask == 1], want[:, mask == 1])
        run.note("left_alone", mine[:, mask < 1], want[:, mask < 1])
    spreads = {k: float(np.mean(v)) for k, v in run.spreads.items() if v}
    return Checks(run.errors, spreads, tuple(sorted(run.state.audited)))


def own_errors(name: str, family: str, steps: int = 10, seed: int = 3, **settings: Any) -> dict[str, float]:
    """The sampler's own largest errors with a perfect denoiser, in a run that nothing is put into.

    `unguarded` is that of the pipeline's final latent without a tap. The others are named as in `Checks.errors`.
    """
    sampler, clean = SAMPLERS[name], latents(family, 2, seed)
    pipe = pipeline(sampler, family, clean)
    call = {"num_inference_steps": steps, "height": small.PIXELS, "width": small.PIXELS, **sampler.call, **settings}
    with small.seeded(seed), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        out = pipe(["", ""], generator=generator, output_type="latent", **call).images
    alone = float((family_of(pipe).unpack(out, (GRID, GRID)) - clean).abs().max())
    found = checked(name, family, steps, NEVER, seed, **settings).errors
    return {"reinserted": found["early_stop"], **found, "unguarded": alone}


def allowed(name: str, family: str, **settings: Any) -> dict[str, float]:
    """The largest error of each quantity that is not the guard's: rounding, and what a drifting sampler does alone."""
    own = own_errors(name, family, **settings) if SAMPLERS[name].drifts else {}
    quantities = ("x0", "early_stop", "reinserted", "held", "left_alone")
    return {what: own.get(what, 0.0) + TOLERANCE for what in quantities}


def measured() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Metrics `perfect_denoiser.max_error.<scheduler>` and one row for each scheduler and family."""
    rows: list[dict[str, Any]] = []
    for name, sampler in SAMPLERS.items():
        for family in sampler.families:
            found = checked(name, family)
            errors = {f"error_{k}": v for k, v in found.errors.items()}
            spreads = {f"spread_{k}": v for k, v in found.spreads.items()}
            most = {f"allowed_{k}": v for k, v in allowed(name, family).items()}
            rows.append({"scheduler": name, "family": family, **errors, **spreads, **most})
    metrics = {}
    for name in SAMPLERS:
        limit = max(v for r in rows if r["scheduler"] == name for k, v in r.items() if k.startswith("allowed_"))
        own = [v for r in rows if r["scheduler"] == name for k, v in r.items() if k.startswith("error_")]
        metrics[f"perfect_denoiser.max_error.{name}"] = metric(max(own), len(own), goal=f"<={limit:.5g}")
    return metrics, rows
