"""The guard inside a ComfyUI workflow: it audits the clean estimate after guidance, in every audited step.

ComfyUI calls a model's post-CFG functions with the denoised latent x̂0 and continues with what they return. An accepted
repair is put into x̂0 inside its mask and held there in all remaining steps. An error stops the workflow before it
releases anything. ComfyUI is not imported; its objects are used only through the methods called below.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import latent_mask
from guardpaint.config import audited_steps
from guardpaint.draft.views import PixelView
from guardpaint.errors import BadConfig, BadInput, NotFinite
from guardpaint.guard import GuardPaint
from guardpaint.loop.call import Hold, ImageState
from guardpaint.loop.context import RepairPlan, StepContext
from guardpaint.loop.pictures import placeholder
from guardpaint.loop.recorder import Recorder
from guardpaint.loop.release import components, report_of, unguarded, views_of
from guardpaint.loop.report import GuardReport, Status
from guardpaint.loop.step import run_step
from guardpaint.loop.verdict import Decision, conclude, failed
from guardpaint.reinsert.rules import held_estimate
from guardpaint.store.images import from_pil
from guardpaint.types import Draft, Level
from guardpaint.verify.passes import Passes

Codec = Callable[[Float[Tensor, "b c h w"]], Float[Tensor, "b d u v"]]


class StepView(PixelView):
    """A decoded clean estimate and how noisy the step was."""

    kind = "x0"

    def __init__(self, image: Float[Tensor, "3 h w"], noise: float) -> None:
        super().__init__(image, "full")
        self.noise = noise


@dataclass
class Session:
    """The state of one guarded model in a workflow. It is reset when a new sampling run begins."""

    guard: GuardPaint
    decode: Codec
    """Latents as the sampler holds them → pictures in [0, 1]."""
    encode: Codec
    prompt: str | None
    seed: int
    sampling: Any
    """ComfyUI's model_sampling of the current run, which knows the training time of every σ."""
    images: list[ImageState] = field(default_factory=list)
    holds: dict[int, Hold] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)
    audited: set[int] = field(default_factory=set)
    sigmas: Tensor | None = None
    steps: int = 0
    """Number of steps of the current sampling run; 0 if there is none."""
    guidance: float | None = None
    notes: list[str] = field(default_factory=list)
    """What of the current run the guard was not calibrated for."""
    began: float = field(default_factory=time.perf_counter)

    def level(self, sigma: float) -> Level:
        noise = noise_at(self.sampling, sigma)
        return Level(1 - sigma, sigma, noise) if is_flow(self.sampling) else Level(1.0, sigma, noise)

    @torch.no_grad()
    def post_cfg(self, args: dict[str, Any]) -> Tensor:
        """ComfyUI's post-CFG function: returns x̂0 with the holds applied, or the same tensor if there are none."""
        x0: Tensor = args["denoised"]
        if x0.dim() != 4:
            raise BadInput(f"latents of shape {tuple(x0.shape)}: the guard knows pictures, [batch, channels, h, w]")
        sigmas = args["model_options"].get("transformer_options", {}).get("sample_sigmas")
        if sigmas is None:
            raise BadInput("this sampler does not pass sample_sigmas, so its steps cannot be guarded; use another one")
        sigma, steps = float(args["sigma"].flatten()[0]), len(sigmas) - 1
        at = [i for i in range(steps) if abs(float(sigmas[i]) - sigma) <= 1e-5 * max(1.0, sigma)]
        if at:
            self.turn(at[0], len(x0), sigmas)
            self.sampling = checked(args["model"].model_sampling)
            self.steps, self.guidance = steps, args.get("cond_scale")
            due = at[0] in audited_steps(steps, self.guard.config) and at[0] not in self.audited
            if due and self.guard.config.mode != "off":
                self.audited.add(at[0])
                self.audit(x0, args["input"], at[0], steps, [float(s) for s in sigmas])
        return self.held(x0)

    def turn(self, step: int, count: int, sigmas: Tensor | None) -> None:
        """Reset the session if a new run begins: at step 0, with other sigmas, or with another batch size."""
        same = self.sigmas is not None and sigmas is not None and torch.equal(self.sigmas, sigmas)
        if step == 0 or not same or len(self.images) != count:
            self.forget()
            config = self.guard.config
            recorders = [Recorder(config.retain_evidence, config.timeout_s) for _ in range(count)]
            self.images = [ImageState(self.prompt, self.seed, i, r) for i, r in enumerate(recorders)]
            self.sigmas = sigmas

    def forget(self) -> None:
        self.images, self.holds, self.drafts, self.audited = [], {}, [], set()
        self.sigmas, self.steps, self.guidance, self.notes = None, 0, None, []
        self.began = time.perf_counter()

    def held(self, x0: Tensor) -> Tensor:
        if not self.holds:
            return x0
        out = x0.clone()
        for i, hold in self.holds.items():
            out[i] = held_estimate(x0[i].float(), hold.z0.to(x0.device), hold.weight.to(x0.device)).to(x0.dtype)
        return out

    def audit(self, x0: Tensor, sample: Tensor, step: int, steps: int, sigmas: list[float]) -> None:
        if not torch.isfinite(x0).all():
            raise NotFinite(f"latents hold NaN or infinity at step {step}")
        before, after = self.level(sigmas[step]), self.level(sigmas[step + 1])
        shown = self.held(x0).float()
        pictures = self.decode(shown).float().clamp(0, 1).cpu()
        self.check_scope((int(pictures.shape[-2]), int(pictures.shape[-1])))
        self.drafts = []
        for i, (image, picture) in enumerate(zip(self.images, pictures, strict=True)):
            z, x = sample[i].float().cpu(), shown[i].cpu()
            eps = (z - before.signal * x) / max(before.sigma, 1e-6)
            draft = Draft(step, steps, x * after.signal + eps * after.sigma, x, eps, before, after, None)  # type: ignore[arg-type]
            self.drafts.append(draft)
            context = self.context(image, draft, StepView(picture, before.noise), image.edited)
            first = context.look(context.view.at(self.guard.parts.first_size(draft.progress))[None])[0]
            context.writer.picture("view", 0, picture, first.adv_map)
            won = self.passes.alone(run_step(context, context.in_tiles(first, context.view))).repair
            if won is not None:
                self.hold(i, won.view, won.mask, x)
                image.edited = True
                how = {"rule": "held_substitution", "asked": "held_substitution", "note": "post-CFG"}
                context.writer.reinserted(how)

    def check_scope(self, size: tuple[int, int]) -> None:
        """Warn, and note for the reports, if a run has settings that the guard was not calibrated for."""
        parts = self.guard.parts
        self.notes += [note for note in parts.unseen(size) if note not in self.notes]
        for note in parts.uncalibrated(size, self.guidance, self.steps or None):
            if note not in self.notes:
                self.notes.append(note)
                warnings.warn(f"{note}; its miss rate is not known here", stacklevel=2)

    @property
    def passes(self) -> Passes:
        return self.guard.parts.passes

    def hold(self, i: int, view: Float[Tensor, "3 h w"], mask: Float[Tensor, "h w"], x: Tensor) -> None:
        """Keep x̂0 at an accepted repair from this step on."""
        z0 = self.encode(view[None])[0].float().cpu()
        weight = latent_mask(mask, (int(x.shape[-2]), int(x.shape[-1]))).expand_as(x) * self.guard.config.hold
        if i in self.holds:
            weight = torch.maximum(weight, self.holds[i].weight)
        if z0.shape != x.shape or not torch.isfinite(z0).all():
            raise NotFinite(f"the VAE made {tuple(z0.shape)} of a repair; finite {tuple(x.shape)} was expected")
        self.holds[i] = Hold(z0, weight)

    def context(self, image: ImageState, draft: Draft | None, view: PixelView, edited: bool) -> StepContext:
        writer = image.recorder.open(draft, view.kind, view.noise)
        return StepContext(
            self.guard.parts, draft, view, image.prompt, image.seed, image.index, edited, writer, image.memo
        )

    @torch.no_grad()
    def release(self, images: Float[Tensor, "b h w 3"]) -> tuple[Float[Tensor, "b h w 3"], list[GuardReport]]:
        """Make the final verdict on decoded pictures; a blocked one is replaced by a placeholder.

        It is not known here which run a picture comes from (ComfyUI caches earlier samples, and one model may serve two
        samplers), so every picture is audited at both sizes, like an edited one.
        """
        known = len(self.images) == len(images)
        if not known:
            self.turn(0, len(images), None)
        if self.guard.config.mode != "off":
            self.check_scope((int(images.shape[1]), int(images.shape[2])))
        out = images.clone()
        reports = []
        for i, image in enumerate(self.images):
            draft = self.drafts[i] if i < len(self.drafts) else None
            decision = self.decide(image, images[i].float().cpu().permute(2, 0, 1), draft)
            shown = None if decision.repair is None else decision.repair.view
            if decision.status is Status.BLOCKED:
                shown = from_pil(placeholder(int(images.shape[2]), int(images.shape[1])))
            if shown is not None:
                out[i] = shown.permute(1, 2, 0).to(out)
            reports.append(self.report(i, image, decision.status, known))
        if self.guard.audit_log is not None:
            self.guard.audit_log.append([r.to_dict() for r in reports])
        self.forget()
        return out, reports

    def decide(self, image: ImageState, picture: Float[Tensor, "3 h w"], draft: Draft | None) -> Decision:
        """The decision about one picture. Any error fails closed."""
        mode = self.guard.config.mode
        if mode == "off":
            return Decision(Status.UNGUARDED)
        try:
            context = self.context(image, draft, PixelView(picture), edited=True)
            plan = None if draft is None else RepairPlan.usual(self.guard.parts, label="final ")
            decision = self.passes.alone(conclude(context, picture, image.edited, plan))
            image.recorder.finish(decision.verdict, decision.audits, decision.ladder, decision.approvals)
            if decision.repair is not None and decision.status.released:
                context.writer.composed()
            return decision
        except Exception as error:
            image.errors.append(f"{type(error).__name__}: {error}")
            return failed(mode)

    def report(self, i: int, image: ImageState, status: Status, known: bool) -> GuardReport:
        parts = self.guard.parts
        skipped = [{"what": "guard", "why": note} for note in self.notes]
        skipped += unguarded(parts)
        if not known:
            skipped.append({"what": "steps", "why": "the pictures come from no sampling run of this guard"})
        elif not self.audited and parts.config.mode != "off":
            skipped.append({"what": "steps", "why": "the sampler made none of the steps that are audited"})
        if image.prompt is None:
            skipped.append({"what": "repair", "why": "no prompt text: F is unavailable"})
        if parts.config.glance_from is not None:
            skipped.append(
                {"what": "glances", "why": "a workflow has no tiny decoder, so every look is a whole decode"}
            )
        settings = {
            **components(parts),
            "on_error": "raise",
            "view_decoder": "full",
            "views": views_of(parts, ["full"]),
            "scheduler": "ComfyUI",
            "executed_steps": self.steps,
            "audited_steps": sorted(self.audited),
            "door": "comfyui",
            "weights": {},
            "skipped": skipped,
        }
        names = (secrets.token_hex(8), "ComfyUI", "comfyui")
        return report_of(parts, names, i, image, status, settings, time.perf_counter() - self.began)


def is_flow(sampling: Any) -> bool:
    """Whether σ is a share of noise (flow matching) or a standard deviation over clean latents."""
    return any(c.__name__ == "CONST" for c in type(sampling).__mro__)


def noise_at(sampling: Any, sigma: float) -> float:
    """The normalised noise time of a σ: t/T of the model's own schedule; σ itself in flow matching."""
    if is_flow(sampling) or sigma <= 0:
        return sigma
    return float(sampling.timestep(torch.tensor([sigma]))[0]) / int(sampling.num_timesteps)


def checked(sampling: Any) -> Any:
    """The same object, if it can say at which training time a σ lies: the last time at the highest σ."""
    timed = is_flow(sampling) or "num_timesteps" in vars(sampling)
    if not timed or not 0.9 < noise_at(sampling, 1.0 if is_flow(sampling) else float(sampling.sigma_max)) <= 1.0:
        raise BadConfig(
            f"{type(sampling).__name__} has no training time steps, so the auditor cannot be told how noisy a step is; "
            "the guard knows models sampled by ModelSamplingDiscrete (SD, SDXL) and flow models (SD 3, FLUX)"
        )
    return sampling


def guarded(model: Any, vae: Any, guard: GuardPaint, prompt: str, seed: int) -> tuple[Any, Session]:
    """A clone of ComfyUI's MODEL with the guard in its post-CFG functions, and the session for the final verdict."""
    if guard.parts.repairer.name == "native":
        raise BadConfig("the native repairer needs a diffusers pipeline; give the guard an inpainter")
    guard.require_views({"full"}, "a ComfyUI workflow, which decodes with its VAE,")
    guard.say_uncovered()
    inner = model.model

    def decode(z: Tensor) -> Tensor:
        return vae.decode(inner.process_latent_out(z)).movedim(-1, 1)[:, :3]

    def encode(pictures: Tensor) -> Tensor:
        return inner.process_latent_in(vae.encode(pictures.movedim(1, -1)))

    sampling = checked(model.get_model_object("model_sampling"))
    session = Session(guard, decode, encode, prompt or None, seed, sampling)
    twin = model.clone()
    twin.set_model_sampler_post_cfg_function(session.post_cfg)
    return twin, session
