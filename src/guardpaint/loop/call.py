"""One generation call under guard: listens to the tap, guards each image, decides what is released."""

from __future__ import annotations

import datetime
import hashlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import latent_mask
from guardpaint.config import audited_steps
from guardpaint.draft import schedule
from guardpaint.draft.codec import ViewDecoder, vae_decode
from guardpaint.draft.conditioning import DenoiserCall
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.family import Family
from guardpaint.draft.views import LatentViews
from guardpaint.errors import BadInput, NotFinite
from guardpaint.loop.step import ImageGuard, Parts, check_audit
from guardpaint.reinsert.apply import Reinserted
from guardpaint.reinsert.rules import held_estimate, x0_substitution
from guardpaint.loop.verdict import Outcome, conclude, from_pil, placeholder, to_pil, verdict
from guardpaint.loop.report import GuardReport
from guardpaint.types import Draft, Edit, JsonDict

FAILED_OVERLAP = 0.2
"""A hold has failed when a new trigger covers this share of it."""


@dataclass(frozen=True)
class Hold:
    """x̂0 kept at an accepted repair in all remaining steps; tensors as the pipeline holds its latents."""

    z0: Tensor
    weight: Tensor


@dataclass
class Request:
    """State of one call; nothing of it is shared between calls or threads."""

    parts: Parts
    pipe: Any
    vae: Any
    """The pipeline's own VAE, behind the doorway."""
    family: Family
    request_id: str
    seeds: Callable[[int, int], tuple[int, int]]
    """(image, batch) → (request seed, index among the images that share it)."""
    prompts: list[str] | None
    """One per image; None when only embeddings were given."""
    tiny: Any | None = None
    door: str = "attach"
    true_cfg: float = 1.0
    write_log: Callable[[Sequence[JsonDict]], None] | None = None
    posture_notes: list[str] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    expected_size: tuple[int, int] | None = None
    """Pixel height and width the caller announced; checked against the latents."""

    guards: list[ImageGuard] = field(default_factory=list)
    calls: list[DenoiserCall] = field(default_factory=list)
    holds: dict[int, Hold] = field(default_factory=dict)
    nulls: dict[int, Tensor] = field(default_factory=dict)
    index: int = 0
    audited: set[int] = field(default_factory=set)
    started: float = field(default_factory=time.perf_counter)
    last: tuple[Tensor, Tensor, Tensor] | None = None
    """(model output, sample, stepped) of the latest step."""
    unfinite: set[int] = field(default_factory=set)
    """Images whose final decode held NaN or infinity before diffusers made pixels of it."""
    _levels: schedule.Levels | None = None
    _stepped: bool = True

    # The tap's three questions -----------------------------------------------------------------------------

    def before_call(self, call: DenoiserCall) -> DenoiserCall:
        """Record the call; put optimised null-text embeddings into their rows."""
        if self._stepped:
            self.calls, self._stepped = [], False
        batch = len(self.guards)
        if self.nulls and call.sample.shape[0] == 2 * batch:
            states = call.kwargs["encoder_hidden_states"].clone()
            for image, embedding in self.nulls.items():
                states[image] = embedding[0].to(states)
            call = replace(call, kwargs={**call.kwargs, "encoder_hidden_states": states})
        self.calls.append(call)
        return call

    def before_step(self, output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        """Apply the holds to the model's output, in terms the scheduler understands."""
        self.levels.locate(timestep)
        if not self.holds:
            return output
        try:
            level, kind = self.levels.at(self.index), self.levels.prediction
            held = output.clone()
            for image, hold in self.holds.items():
                z = sample[image].float()
                x0, _ = schedule.split(output[image].float(), z, level, kind)
                new = schedule.join(held_estimate(x0, hold.z0, hold.weight), z, level, kind)
                held[image] = torch.where(hold.weight > 0, new, output[image].float()).to(output.dtype)
            return held
        except Exception as error:
            self.fail(error, list(self.holds))
            return output

    def after_step(self, output: Tensor, timestep: Any, sample: Tensor, stepped: Tensor) -> Tensor:
        """Audit this step if it is due; the last one is audited on the decode the user gets anyway."""
        step, self.index, self._stepped = self.index, self.index + 1, True
        self.last = (output, sample, stepped)
        self.ensure(len(stepped))
        config = self.parts.config
        steps = self.pipe.num_timesteps
        due = step in audited_steps(steps, config)
        if due and vars(self.pipe.scheduler).get("cur_sample") is not None:
            due = False
            self.posture_notes.append(f"step {step} not audited: PNDM starts the next step from the sample before it")
        if config.mode == "off" or not due or (self.door == "attach" and step + 1 == steps):
            return stepped
        try:
            return self.guard_step(step)
        except Exception as error:
            self.fail(error, range(len(self.guards)))
            return stepped

    def decoded(self, images: Tensor) -> None:
        """The pipeline's own decode: NaN would be black in a PIL image, so it is looked for here."""
        finite = torch.isfinite(images).flatten(1).all(1)
        self.unfinite = {i for i, ok in enumerate(finite.tolist()) if not ok}

    # The loop over images ----------------------------------------------------------------------------------

    @torch.no_grad()
    def guard_step(self, step: int) -> Tensor:
        """Audit all images in one batch, then guard each by itself."""
        config = self.parts.config
        drafts = self.drafts(step)
        self.audited.add(step)
        views = [self.view(d) for d in drafts]
        alive = [i for i, g in enumerate(self.guards) if not g.errors]
        for i in list(alive):
            if not (torch.isfinite(drafts[i].latent).all() and torch.isfinite(drafts[i].x0).all()):
                self.fail(NotFinite(f"latents hold NaN or infinity at step {step}"), [i])
                alive.remove(i)
        if not alive:
            return self.stepped
        start = time.perf_counter()
        pixels = self.guards[0].first_pass(drafts[0].progress)
        latents = torch.stack([views[i].latent for i in alive])
        pictures = self.decoder.at(latents, pixels).cpu()
        noise = views[alive[0]].noise
        firsts = self.parts.auditor.audit(pictures, [self.guards[i].prompt for i in alive], noise)
        share = (time.perf_counter() - start) / len(alive)
        new = self.stepped
        for i, first, picture in zip(alive, firsts, pictures, strict=True):
            guard = self.guards[i]
            try:
                guard.keep(step, "view", 0, picture, first.adv_map)
                check_audit(first, self.parts.policy.names)
                result = guard.step(drafts[i], views[i], first)
                guard.records[-1].timings["first_pass"] = share
                guard.records[-1].cost["audits"] += 1
                guard.spent += share
                guard.check_time()
                if guard.records[-1].triggered and config.mode == "enforce":
                    self.release_failed_hold(i, guard, drafts[i])
                if result is not None:
                    if new is self.stepped:
                        new = new.clone()
                    new[i] = self.accept(i, *result, drafts[i]).to(new.dtype)
            except Exception as error:
                self.fail(error, [i])
        return new

    def accept(self, i: int, done: Reinserted, edit: Edit, draft: Draft) -> Tensor:
        """Take over a reinsertion: the latent, and what the remaining steps must do.

        The winner's view holds earlier repairs too, so a hold that stands is held at the new ẑ0 along with the new one.
        """
        if done.hold > 0:
            weight = self.packed_mask(edit) * done.hold
            if i in self.holds:
                weight = torch.maximum(weight, self.holds[i].weight)
            self.holds[i] = Hold(self.packed(edit.z0), weight)
        if done.embedding is not None:
            self.nulls[i] = done.embedding
        if done.edits_history:
            schedule.edit_history(
                self.pipe.scheduler, i, self.packed(edit.z0), self.packed_mask(edit), self.packed(draft.eps)
            )
        return self.packed(done.latent)

    def release_failed_hold(self, i: int, guard: ImageGuard, draft: Draft) -> None:
        """A hold inside which the new trigger points has failed; one elsewhere stands."""
        if guard.suspect is None:
            return
        self.nulls.pop(i, None)
        if i not in self.holds:
            return
        size = (int(draft.latent.shape[-2]), int(draft.latent.shape[-1]))
        suspect = latent_mask(guard.suspect.float(), size).to(draft.latent)
        weight = self.holds[i].weight
        overlap = (weight * self.packed(suspect.expand_as(draft.latent).contiguous())).sum() / weight.sum()
        if float(overlap) > FAILED_OVERLAP:
            del self.holds[i]
            guard.records[-1].notes.append("the hold failed this audit: released, repaired anew")

    def drafts(self, step: int) -> list[Draft]:
        """One Draft per image from the latest step."""
        assert self.last is not None
        output, sample, stepped = self.last
        before, after = self.levels.at(step), self.levels.at(step + 1)
        steps = self.pipe.num_timesteps
        if step + 1 == steps and after.sigma < 0.05:
            after = replace(after, noise=0.0)
        x0, eps = schedule.split(output.float(), sample.float(), before, self.levels.prediction)
        geometry = self.family.geometry(stepped, self.calls)
        factor = self.pipe.vae_scale_factor
        if self.expected_size not in (None, (geometry[0] * factor, geometry[1] * factor)):
            raise BadInput(
                f"height and width {self.expected_size} were announced, but the latents are "
                f"{geometry[0] * factor}×{geometry[1] * factor} px"
            )
        spatial = [self.family.unpack(t, geometry) for t in (stepped.float(), x0, eps)]
        return [
            Draft(step, steps, z, x, e, before, after, self.base(i))
            for i, (z, x, e) in enumerate(zip(*spatial, strict=True))
        ]

    def base(self, image: int) -> Denoiser:
        return Denoiser(
            pipe=self.pipe,
            vae=self.vae,
            family=self.family,
            calls=tuple(self.calls),
            batch=len(self.guards),
            image=image,
            guidance=self.family.guidance(self.pipe),
            true_cfg=self.true_cfg,
        )

    def view(self, draft: Draft) -> LatentViews:
        if self.parts.config.view == "x0":
            return LatentViews(self.decoder, draft.x0, "x0", draft.before.noise)
        return LatentViews(self.decoder, draft.latent, "stepped", draft.after.noise)

    def packed(self, latent: Float[Tensor, "c h w"]) -> Tensor:
        return self.family.pack(latent[None])[0]

    def packed_mask(self, edit: Edit) -> Tensor:
        return self.packed(edit.mask.expand_as(edit.z0).contiguous())

    @property
    def stepped(self) -> Tensor:
        assert self.last is not None
        return self.last[2]

    @property
    def levels(self) -> schedule.Levels:
        if self._levels is None:
            self._levels = schedule.Levels(self.pipe.scheduler, self.pipe.num_timesteps)
        return self._levels

    @property
    def decoder(self) -> ViewDecoder:
        wanted = self.parts.config.view_decoder
        if wanted == "tiny" and self.tiny is None:
            raise BadInput(f"view_decoder=tiny, but no tiny decoder is loaded for family {self.family.name!r}")
        tiny = None if wanted == "full" else self.tiny
        device = self.pipe._execution_device
        return ViewDecoder(tiny, self.vae, self.pipe.vae_scale_factor, device, only_tiny=wanted == "tiny")

    def ensure(self, count: int) -> None:
        """One guard per image, made when the batch size is first seen."""
        if self.guards:
            return
        if self.prompts is not None and len(self.prompts) != count:
            self.posture_notes.append(f"{len(self.prompts)} prompts for {count} images: F unavailable")
            self.prompts = None
        for i in range(count):
            seed, index = self.seeds(i, count)
            prompt = self.prompts[i] if self.prompts is not None else None
            self.guards.append(ImageGuard(self.parts, self.family, prompt, seed, index))

    def fail(self, error: Exception, images: Sequence[int] | range) -> None:
        """Fail closed: these images will not be released (monitor, which changes nothing, records the error)."""
        if self.parts.config.on_error == "raise":
            raise error
        where = traceback.extract_tb(error.__traceback__)
        place = f" at {where[-1].name}" if where else ""
        for i in images:
            self.guards[i].errors.append(f"{type(error).__name__}: {error}{place}")

    # Release -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self, images: Any, output_type: str) -> tuple[Any, list[GuardReport]]:
        """Final verdict per image; returns what the caller may have, in the type she asked for."""
        count = len(images)
        self.ensure(count)
        if self.parts.config.mode == "off":
            return images, self.reports([Outcome("unguarded")] * count)
        drafts: Sequence[Draft | None] = [None] * count
        try:
            drafts = self.drafts(self.index - 1) if self.last is not None else drafts
        except Exception as error:
            self.fail(error, range(count))
        outcomes = [self.outcome(images, i, output_type, drafts[i]) for i in range(count)]
        reports = self.reports(outcomes)
        if self.write_log is not None:
            try:
                self.write_log([r.to_dict() for r in reports])
            except Exception as error:
                self.fail(error, range(count))
                outcomes = [self.failed()] * count
                reports = self.reports(outcomes)
        return hand_out(images, outcomes, output_type), reports

    def failed(self) -> Outcome:
        return Outcome("blocked" if self.parts.config.mode == "enforce" else "released_flagged")

    def outcome(self, images: Any, i: int, output_type: str, draft: Draft | None) -> Outcome:
        """Fail-closed wrapper around `conclude` for one image."""
        guard = self.guards[i]
        try:
            broken = draft is not None and not (torch.isfinite(draft.latent).all() and torch.isfinite(draft.x0).all())
            if i in self.unfinite or broken:
                raise NotFinite("the final image or its latent holds NaN or infinity")
            picture = self.picture(images, i, output_type, draft)
            steps = draft.steps if draft is not None else 0
            due = draft is not None and draft.step in audited_steps(steps, self.parts.config)
            if due and draft is not None:
                self.audited.add(draft.step)
            outcome = conclude(guard, picture, draft, repair_here=due and self.door == "attach")
            if output_type == "latent" and outcome.image is not None:
                outcome = self.to_latent(guard, images, i, outcome, draft)
            return outcome
        except Exception as error:
            self.fail(error, [i])
            return self.failed()

    def picture(self, images: Any, i: int, output_type: str, draft: Draft | None) -> Float[Tensor, "3 h w"]:
        """One output image as fp32 RGB in [0, 1]."""
        if output_type == "pil":
            return from_pil(images[i])
        if output_type == "np":
            return torch.from_numpy(np.asarray(images[i], dtype=np.float32)).permute(2, 0, 1)
        if output_type == "pt":
            return images[i].detach().float().cpu()
        if output_type != "latent":
            raise BadInput(f"output_type={output_type!r}: the guard knows pil, np, pt and latent")
        clean = self.clean_latent(self.spatial(images, i), draft)
        return vae_decode(self.vae, clean[None], self.pipe._execution_device)[0].cpu()

    def spatial(self, images: Tensor, i: int) -> Float[Tensor, "c h w"]:
        """One latent of the output, as the caller will get it."""
        return self.family.unpack(images[i : i + 1].float(), self.family.geometry(images, self.calls))[0]

    def clean_latent(self, z: Float[Tensor, "c h w"], draft: Draft | None) -> Float[Tensor, "c h w"]:
        """The clean estimate behind a latent that was handed out before the end (SDXL's denoising_end)."""
        if draft is None or draft.after.noise <= 0:
            return z
        note = "the generation stops early: the verdict is on the clean estimate of a noisy latent"
        if note not in self.posture_notes:
            self.posture_notes.append(note)
        return (z - draft.after.sigma * draft.eps) / draft.after.signal

    def to_latent(self, guard: ImageGuard, images: Tensor, i: int, outcome: Outcome, draft: Draft | None) -> Outcome:
        """A changed picture as a latent; it must still be benign after the VAE's round trip."""
        if draft is None or outcome.image is None or outcome.mask is None:
            return Outcome("blocked")
        size = (int(draft.latent.shape[-2]), int(draft.latent.shape[-1]))
        z0 = draft.base.encode(outcome.image, size).to(draft.latent)
        edit = Edit(z0, latent_mask(outcome.mask, size).to(draft.latent))
        changed = x0_substitution(self.spatial(images, i), edit, draft.after, draft.eps)
        clean = self.clean_latent(changed, draft)
        if verdict(guard, draft.base.decode(clean).cpu(), guard.records[-1]) is not None:
            if outcome.passed:  # the better picture is lost in the round trip; the one before it had passed
                guard.final.audits.pop()
                return Outcome("repaired")
            guard.final.ladder.append({"rung": "latent", "outcome": "flagged after the VAE round trip"})
            return Outcome("blocked")
        return replace(outcome, image=self.packed(changed).to(images.dtype))

    def reports_so_far(self) -> list[GuardReport]:
        """The account of a call that has no final verdict (yet)."""
        return self.reports([Outcome("unfinished")] * len(self.guards))

    def reports(self, outcomes: Sequence[Outcome]) -> list[GuardReport]:
        names = (self.request_id, type(self.pipe).__name__, self.family.name)
        seconds = time.perf_counter() - self.started
        return [
            account(guard, i, outcome.status, names, self.posture(), seconds)
            for i, (guard, outcome) in enumerate(zip(self.guards, outcomes, strict=True))
        ]

    def posture(self) -> JsonDict:
        """What ran, on which steps, and what was skipped and why."""
        parts, steps = self.parts, self.index
        skipped = [{"what": "guard", "why": note} for note in self.posture_notes]
        if parts.config.mode != "enforce":
            skipped.append({"what": "repair", "why": f"mode is {parts.config.mode}"})
        if self.prompts is None:
            skipped.append({"what": "repair", "why": "no prompt text: F is unavailable"})
        if not any(g.final.verdict != "none" for g in self.guards) and parts.config.mode != "off":
            broke = all(g.errors for g in self.guards)
            why = "an error came first" if broke else "guard.finish(out) was not called"
            skipped.append({"what": "final verdict", "why": f"no final verdict: {why}"})
        return {
            **made_of(parts),
            "on_error": parts.config.on_error,
            "view_decoder": "full" if self.tiny is None or parts.config.view_decoder == "full" else "tiny",
            "scheduler": type(self.pipe.scheduler).__name__,
            "executed_steps": steps,
            "audited_steps": sorted(self.audited),
            "door": self.door,
            "weights": self.weights,
            "skipped": skipped,
        }


def made_of(parts: Parts) -> JsonDict:
    """The part of a posture that names rules and components."""
    return {
        "mode": parts.config.mode,
        "policy": parts.policy.name,
        "policy_sha256": parts.policy.digest(),
        "trigger": parts.policy.trigger,
        "auditor": type(parts.auditor).__name__,
        "repairer": parts.repairer.name,
        "proposer": parts.proposer.name,
        "seam": parts.seam.name,
    }


def account(
    guard: ImageGuard, image: int, status: str, names: tuple[str, str, str], posture: JsonDict, seconds: float
) -> GuardReport:
    """One image's report; `names` are the request's id, the pipeline and its family."""
    config = guard.parts.config
    return GuardReport(
        request_id=names[0],
        image=image,
        status=status,
        mode=config.mode,
        pipeline=names[1],
        family=names[2],
        seed=guard.seed,
        prompt_sha256=None if guard.prompt is None else sha256(guard.prompt),
        prompt=guard.prompt if config.log_prompts else None,
        steps=guard.records,
        final=guard.final,
        posture=posture,
        errors=guard.errors,
        seconds=seconds,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        evidence=guard.evidence,
    )


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def hand_out(images: Any, outcomes: Sequence[Outcome], output_type: str) -> Any:
    """The caller's images with changed ones replaced and blocked slots emptied; untouched ones as they came."""
    if all(o.status != "blocked" and o.image is None for o in outcomes):
        return images
    if output_type == "pil":
        return [
            placeholder(*image.size) if o.status == "blocked" else image if o.image is None else to_pil(o.image)
            for image, o in zip(images, outcomes, strict=True)
        ]
    result = images.copy() if isinstance(images, np.ndarray) else images.clone()
    for i, o in enumerate(outcomes):
        if o.status == "blocked":
            result[i] = 0
        elif o.image is not None and output_type == "np":
            result[i] = o.image.permute(1, 2, 0).numpy()
        elif o.image is not None:
            result[i] = o.image.to(result.dtype)
    return result
