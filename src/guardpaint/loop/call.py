"""One generation call under guard: the tap's listener, which audits steps and keeps accepted repairs in place."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.audit.contract import check_pictures
from guardpaint.audit.regions import latent_mask
from guardpaint.config import audited_steps
from guardpaint.draft import schedule
from guardpaint.draft.codec import ViewDecoder
from guardpaint.draft.conditioning import DenoiserCall
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.early_exit import EarlyExits
from guardpaint.draft.family import Family
from guardpaint.draft.views import LatentView, View
from guardpaint.errors import BadInput, GuardTimeout, NotFinite
from guardpaint.loop import glance as glances
from guardpaint.loop.context import StepContext
from guardpaint.loop.null_text import NullText
from guardpaint.loop.recorder import Recorder
from guardpaint.loop.step import reinsert_repair, run_step
from guardpaint.reinsert.apply import Reinserted
from guardpaint.reinsert.rules import held_estimate
from guardpaint.types import Audit, Draft, Edit, JsonDict
from guardpaint.verify.parts import Parts
from guardpaint.verify.passes import Passes, Work

FAILED_OVERLAP = 0.2
"""A hold has failed when a new trigger covers more than this share of it."""


@dataclass(frozen=True)
class Hold:
    """Keeps x̂0 at an accepted repair in all remaining steps. Tensors have the shape of the pipeline's own latents."""

    z0: Tensor
    weight: Tensor


@dataclass(frozen=True)
class CallSetup:
    """Everything that stays the same during one call."""

    parts: Parts
    pipe: Any
    vae: Any
    """The pipeline's own VAE, not the doorway that the tap puts in its place."""
    family: Family
    request_id: str
    seeds: Callable[[int, int], tuple[int, int]]
    """(image, batch) → (request seed, index among the images that share it)."""
    door: str
    tiny: Any | None = None
    exits: EarlyExits | None = None
    """Early exits of the tiny decoder."""
    true_cfg: float = 1.0
    write_log: Callable[[Sequence[JsonDict]], None] | None = None
    weights: dict[str, str] = field(default_factory=dict)
    expected_size: tuple[int, int] | None = None
    """Pixel height and width that the caller gave to `watch`; they are checked against the latents."""
    callers: Sequence[JsonDict] | None = None
    """Who asked for each image, as a service knows it; goes into the reports."""


@dataclass
class ImageState:
    """The state of one image during a call."""

    prompt: str | None
    seed: int
    index: int
    """Index among the images that share the seed."""
    recorder: Recorder
    edited: bool = False
    """Whether an accepted repair is in its latent."""
    errors: list[str] = field(default_factory=list)
    caller: JsonDict | None = None
    """Who asked for it, as a service knows it."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What the repairer has encoded for it."""


@dataclass(frozen=True)
class LastStep:
    """The latest scheduler step, with tensors in the shape of the pipeline's own latents."""

    output: Tensor
    sample: Tensor
    stepped: Tensor


@dataclass
class CallState:
    """Everything that changes during one call. It is not shared between calls or threads."""

    prompts: list[str] | None
    """One per image; None when only embeddings were given."""
    images: list[ImageState] = field(default_factory=list)
    """One per image; empty until the batch size is known."""
    calls: list[DenoiserCall] = field(default_factory=list)
    """The denoiser calls of the current step."""
    holds: dict[int, Hold] = field(default_factory=dict)
    nulls: dict[int, NullText] = field(default_factory=dict)
    """What null-text does in the remaining steps, by image."""
    index: int = 0
    """Number of executed steps."""
    audited: set[int] = field(default_factory=set)
    last: LastStep | None = None
    stepped: bool = True
    """Whether the scheduler step that belongs to `calls` was made."""
    unfinite: set[int] = field(default_factory=set)
    """Images whose final decode held NaN or infinity before it was converted to pixels."""
    views: tuple[str, ...] = ()
    """How the views of this call are made, as `ViewDecoder.made_by` names it."""
    notes: list[str] = field(default_factory=list)
    """What was skipped in this call, and why; goes into `effective_settings`."""
    started: float = field(default_factory=time.perf_counter)


class GuardedCall:
    """Listens to the tap of one pipeline call (`draft.tap.Listener`)."""

    def __init__(self, setup: CallSetup, prompts: list[str] | None) -> None:
        self.setup, self.state = setup, CallState(prompts)
        self._levels: schedule.Levels | None = None

    # Called by the tap --------------------------------------------------------------------------------

    def before_call(self, call: DenoiserCall) -> DenoiserCall:
        """Record the call, with optimised null-text embeddings in the rows of images that have one."""
        state = self.state
        further = state.calls[1:] if state.stepped else []
        if state.stepped:
            state.calls, state.stepped = [], False
        if state.nulls and call.sample.shape[0] == 2 * len(state.images):
            states = call.kwargs["encoder_hidden_states"].clone()
            for image, null in state.nulls.items():
                states[image] = self.embedding(image, null, (call, *further))[0].to(states)
            call = replace(call, kwargs={**call.kwargs, "encoder_hidden_states": states})
        state.calls.append(call)
        return call

    def before_step(self, output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        """The model output with the holds applied, in the scheduler's own parametrisation."""
        self.levels.locate(timestep)
        holds = self.state.holds
        if not holds:
            return output
        try:
            level, kind = self.levels.at(self.state.index), self.levels.prediction
            held = output.clone()
            for image, hold in holds.items():
                z = sample[image].float()
                x0, _ = schedule.split(output[image].float(), z, level, kind)
                new = schedule.join(held_estimate(x0, hold.z0, hold.weight), z, level, kind)
                held[image] = torch.where(hold.weight > 0, new, output[image].float()).to(output.dtype)
            return held
        except Exception as error:
            self.fail(error, holds)
            return output

    def after_step(self, output: Tensor, timestep: Any, sample: Tensor, stepped: Tensor) -> Tensor:
        """Audit this step if it is due and return the latents to continue from.

        The last step of an attached call is audited later, on the pipeline's own decode.
        """
        state, config = self.state, self.setup.parts.config
        step, state.index, state.stepped = state.index, state.index + 1, True
        state.last = LastStep(output, sample, stepped)
        self.ensure(len(stepped))
        steps = self.setup.pipe.num_timesteps
        due = step in audited_steps(steps, config)
        look = not due and glances.due(step, steps, config)
        if (due or look) and schedule.between(self.setup.pipe.scheduler):
            due = look = False
            state.notes.append(f"step {step} not audited: PNDM starts the next step from the sample before it")
        if config.mode == "off" or not (due or look) or (self.setup.door == "attach" and step + 1 == steps):
            return stepped
        try:
            return self.guard_step(step, stepped) if due else self.glance_step(step, stepped)
        except Exception as error:
            self.fail(error, range(len(state.images)))
            return stepped

    def decoded(self, images: Tensor) -> None:
        """Note which images hold NaN or infinity, because a conversion to PIL would show them as black."""
        finite = torch.isfinite(images).flatten(1).all(1)
        self.state.unfinite = {i for i, ok in enumerate(finite.tolist()) if not ok}

    # One audited step of the batch ----------------------------------------------------------------------

    def glance_step(self, step: int, stepped: Tensor) -> Tensor:
        """Look at all images coarsely and audit those where that gives a reason; otherwise the latents stay."""
        drafts = self.drafts(step)
        alive = [i for i, image in enumerate(self.state.images) if not image.errors and self.finite(drafts[i], i)]
        if not alive:
            return stepped
        self.check_views(drafts[0])
        images = [self.state.images[i] for i in alive]
        found = glances.glance(
            self.setup.parts,
            self.decoder,
            {i: self.view(drafts[i]) for i in alive},
            [image.prompt for image in images],
            [image.recorder for image in images],
            (step, drafts[0].progress),
        )
        for i, image in zip(alive, images, strict=True):
            try:
                image.recorder.spend(sum(g.seconds for g in image.recorder.glances[-1:] if g.step == step))
            except GuardTimeout as error:
                self.fail(error, [i])
        return self.guard_step(step, stepped, found) if found else stepped

    @torch.no_grad()
    def guard_step(self, step: int, stepped: Tensor, only: Collection[int] | None = None) -> Tensor:
        """Audit all images in one batch, or `only` those a glance found, then guard each one separately.

        Returns the latents to continue from.
        """
        drafts = self.drafts(step)
        self.state.audited.add(step)
        wanted = range(len(self.state.images)) if only is None else only
        alive = [i for i in wanted if not self.state.images[i].errors and self.finite(drafts[i], i)]
        if not alive:
            return stepped
        self.check_views(drafts[0])
        views = {i: self.view(drafts[i]) for i in alive}
        start = time.perf_counter()
        pixels = self.setup.parts.first_size(drafts[0].progress)
        pictures = self.decoder.at(torch.stack([views[i].latent for i in alive]), pixels).cpu()
        prompts = [self.state.images[i].prompt for i in alive]
        firsts = self.setup.parts.auditor.audit(pictures, prompts, views[alive[0]].noise)
        share = (time.perf_counter() - start) / len(alive)
        works = {
            i: self.guard_image(i, (drafts[i], views[i]), (first, picture, share), only is not None)
            for i, first, picture in zip(alive, firsts, pictures, strict=True)
        }
        new = stepped
        for i, changed in self.passes.together(works).items():
            if isinstance(changed, Exception):
                self.fail(changed, [i])
            elif changed is not None:
                new = new.clone() if new is stepped else new
                new[i] = changed.to(new.dtype)
        return new

    @property
    def passes(self) -> Passes:
        return self.setup.parts.passes

    def guard_image(
        self, i: int, step: tuple[Draft, LatentView], looked: tuple[Audit, Tensor, float], glanced: bool
    ) -> Work[Tensor | None]:
        """Run one image's step; returns its new latent if a repair was accepted, else None.

        `step` has the draft and the view of the image, `looked` its share of the first audit: the audit, the picture
        that was looked at, and the seconds.
        """
        parts, (first, picture, share) = self.setup.parts, looked
        check_pictures(picture)
        context = self.context(i, *step)
        context.writer.picture("view", 0, picture, first.adv_map)
        context.writer.first_pass(share)
        if glanced:
            context.writer.glanced()
        first = parts.checked(first, context.prompt)
        with context.writer.clock("audit"):
            first = context.in_tiles(first, context.view)
        result = yield from run_step(context, first)
        assert context.draft is not None
        if result.finding is not None and result.suspect is not None and parts.config.mode == "enforce":
            self.release_failed_hold(i, result.suspect, context)
        if result.repair is None:
            return None
        with context.writer.clock("reinsert"):
            reinserted, edit = reinsert_repair(context, result.repair, self.setup.family)
        self.state.images[i].edited = True
        return self.accept(i, reinserted, edit, context.draft)

    def accept(self, i: int, reinserted: Reinserted, edit: Edit, draft: Draft) -> Tensor:
        """Store what the remaining steps must do for a reinsertion, and return its latent.

        The winner's view contains earlier repairs too, so an existing hold is moved to the new ẑ0 and its mask is kept.
        """
        state = self.state
        if reinserted.hold > 0:
            weight = self.packed_mask(edit) * reinserted.hold
            if i in state.holds:
                weight = torch.maximum(weight, state.holds[i].weight)
            state.holds[i] = Hold(self.packed(edit.z0), weight)
        if reinserted.embedding is not None:
            state.nulls[i] = NullText(edit, reinserted.embedding, draft.step + 1, reinserted.every_step)
        if reinserted.edits_history:
            z0, mask, eps = self.packed(edit.z0), self.packed_mask(edit), self.packed(draft.eps)
            self.levels.edit_history(draft.step, i, z0, mask, eps)
        return self.packed(reinserted.latent)

    def release_failed_hold(self, i: int, suspect: Bool[Tensor, "h w"], context: StepContext) -> None:
        """Release the image's hold if the new trigger points into it; a hold elsewhere stays."""
        self.state.nulls.pop(i, None)
        hold = self.state.holds.get(i)
        if hold is None or context.draft is None:
            return
        latent = context.draft.latent
        mask = latent_mask(suspect.float(), (int(latent.shape[-2]), int(latent.shape[-1]))).to(latent)
        overlap = (hold.weight * self.packed(mask.expand_as(latent).contiguous())).sum() / hold.weight.sum()
        if float(overlap) > FAILED_OVERLAP:
            del self.state.holds[i]
            context.writer.note(
                "the held repair was flagged again: the hold is released and the region repaired once more"
            )

    def embedding(self, image: int, null: NullText, calls: Sequence[DenoiserCall]) -> Tensor:
        """The image's unconditional embedding for the current step, optimised now if it needs one of its own.

        `calls` are those of this step; the ones that are still to come are taken from the step before.
        """
        step = self.state.index
        if null.every_step and null.step != step:
            start = time.perf_counter()
            try:
                base = replace(self.base(image), calls=tuple(calls))
                null.optimise(step, calls[0].sample[image], self.levels.at(step), base)
                self.state.images[image].recorder.spend(time.perf_counter() - start)
            except Exception as error:
                self.fail(error, [image])
        return null.embedding

    # Inputs of the stages --------------------------------------------------------------------------

    def context(self, i: int, draft: Draft | None, view: View) -> StepContext:
        """The context of one image's step; begins the step's record."""
        image = self.state.images[i]
        writer = image.recorder.open(draft, view.kind, view.noise)
        return StepContext(
            self.setup.parts, draft, view, image.prompt, image.seed, image.index, image.edited, writer, image.memo
        )

    def finite(self, draft: Draft, i: int) -> bool:
        """Whether an image's latents are finite; if not, the image fails."""
        good = is_finite(draft)
        if not good:
            self.fail(NotFinite(f"latents hold NaN or infinity at step {draft.step}"), [i])
        return good

    def drafts(self, step: int) -> list[Draft]:
        """One Draft per image from the latest step."""
        setup, last = self.setup, self.state.last
        assert last is not None
        before, after = self.levels.at(step), self.levels.at(step + 1)
        steps = setup.pipe.num_timesteps
        if step + 1 == steps and after.sigma < 0.05:
            after = replace(after, noise=0.0)
        x0, eps = schedule.split(last.output.float(), last.sample.float(), before, self.levels.prediction)
        geometry = setup.family.geometry(last.stepped, self.state.calls)
        factor = setup.pipe.vae_scale_factor
        size = geometry[0] * factor, geometry[1] * factor
        if setup.expected_size not in (None, size):
            raise BadInput(
                f"watch() was given height, width {setup.expected_size}, but the latents are {size[0]}×{size[1]} px; "
                "give the size that is generated"
            )
        self.check_scope(size)
        spatial = [setup.family.unpack(t, geometry) for t in (last.stepped.float(), x0, eps)]
        return [
            Draft(step, steps, z, x, self.levels.noise_after(z, x, e, after), before, after, self.base(i))
            for i, (z, x, e) in enumerate(zip(*spatial, strict=True))
        ]

    def check_scope(self, size: tuple[int, int]) -> None:
        """Warn, and note for the reports, if the call runs with settings that the guard was not calibrated for."""
        setup, notes = self.setup, self.state.notes
        notes += [note for note in setup.parts.unseen(size) if note not in notes]
        guidance = setup.family.guidance(setup.pipe) if setup.family.name != "flux" else None
        for note in setup.parts.uncalibrated(size, guidance, setup.pipe.num_timesteps):
            if note not in notes:
                notes.append(note)
                warnings.warn(f"{note}; its miss rate is not known here", stacklevel=2)

    def check_views(self, draft: Draft) -> None:
        """Note how the call's views are made; warn if the thresholds were not calibrated on such views."""
        parts = self.setup.parts
        if self.state.views:
            return
        factor = self.setup.pipe.vae_scale_factor
        size = draft.x0.shape[-2] * factor, draft.x0.shape[-1] * factor
        self.state.views = self.decoder.ways_at(size, parts.look_sizes)
        calibration = parts.config.calibration
        if calibration is None or not calibration.views:
            return
        other = [v for v in self.state.views if v not in calibration.views]
        if other:
            note = f"views that the thresholds were not calibrated on: {', '.join(other)}"
            self.state.notes.append(note)
            warnings.warn(f"{note}; their miss rate is not known", stacklevel=2)

    def base(self, image: int) -> Denoiser:
        """The base's denoiser and VAE for one image of the batch."""
        setup = self.setup
        return Denoiser(
            pipe=setup.pipe,
            vae=setup.vae,
            family=setup.family,
            calls=tuple(self.state.calls),
            batch=len(self.state.images),
            image=image,
            **setup.family.guidance_of(setup.pipe),
            true_cfg=setup.true_cfg,
        )

    def view(self, draft: Draft) -> LatentView:
        """A view of the clean estimate or, with `view="stepped"`, of the stepped latent."""
        if self.setup.parts.config.view == "x0":
            return LatentView(self.decoder, draft.x0, "x0", draft.before.noise)
        return LatentView(self.decoder, draft.latent, "stepped", draft.after.noise)

    def packed(self, latent: Float[Tensor, "c h w"]) -> Tensor:
        return self.setup.family.pack(latent[None])[0]

    def packed_mask(self, edit: Edit) -> Tensor:
        return self.packed(edit.mask.expand_as(edit.z0).contiguous())

    @property
    def levels(self) -> schedule.Levels:
        if self._levels is None:
            self._levels = schedule.Levels(self.setup.pipe.scheduler, self.setup.pipe.num_timesteps)
        return self._levels

    @cached_property
    def decoder(self) -> ViewDecoder:
        """The decoder of views: the tiny one if it is loaded and the configuration allows it, else the VAE."""
        setup, wanted = self.setup, self.setup.parts.config.view_decoder
        if wanted == "tiny" and setup.tiny is None:
            raise BadInput(
                f"view_decoder=tiny, but the guard has no tiny decoder for family {setup.family.name!r}; "
                "pass one in decoders= or choose auto"
            )
        tiny = None if wanted == "full" else setup.tiny
        device, factor = setup.pipe._execution_device, setup.pipe.vae_scale_factor
        exits = None if tiny is None else setup.exits
        return ViewDecoder(tiny, setup.vae, factor, device, only_tiny=wanted == "tiny", exits=exits)

    def ensure(self, count: int) -> None:
        """Make one state per image, unless that has been done."""
        state, config = self.state, self.setup.parts.config
        if state.images:
            return
        callers: Sequence[JsonDict | None] = self.setup.callers or [None] * count
        if len(callers) != count:
            raise BadInput(f"{len(callers)} callers for {count} images: name one for each image")
        if state.prompts is not None and len(state.prompts) != count:
            state.notes.append(f"{len(state.prompts)} prompts for {count} images: F unavailable")
            state.prompts = None
        for i in range(count):
            seed, index = self.setup.seeds(i, count)
            prompt = state.prompts[i] if state.prompts is not None else None
            recorder = Recorder(config.retain_evidence, config.timeout_s)
            state.images.append(ImageState(prompt, seed, index, recorder, caller=callers[i]))

    def fail(self, error: Exception, images: Iterable[int]) -> None:
        """Record an error on these images, which enforce mode then blocks; raise it if `on_error` is `raise`."""
        if self.setup.parts.config.on_error == "raise":
            raise error
        where = traceback.extract_tb(error.__traceback__)
        place = f" at {where[-1].name}" if where else ""
        for i in images:
            self.state.images[i].errors.append(f"{type(error).__name__}: {error}{place}")


def is_finite(draft: Draft) -> bool:
    """Whether a step's latent and clean estimate hold no NaN and no infinity."""
    return bool(torch.isfinite(draft.latent).all() and torch.isfinite(draft.x0).all())
