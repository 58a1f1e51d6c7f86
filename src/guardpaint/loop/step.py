"""THE loop: one audited step of one image. Audit → repair → verify → reinsert.

Every stage is a function of a frozen `StepContext` and returns a value; records are written by the context's writer. A
stage that needs the repairer or the auditor is a generator (`verify.passes`), so that images of a batch share passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.audit.gradcam import grad_cam
from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import latent_mask, mine, union
from guardpaint.draft.family import Family
from guardpaint.draft.views import PixelView, shrink
from guardpaint.errors import NotFinite
from guardpaint.loop.context import Repair, RepairPlan, StepContext
from guardpaint.loop.regions import Turn, regions_in_turn, regions_together
from guardpaint.loop.report import AuditRecord
from guardpaint.policy import Finding
from guardpaint.reinsert.apply import Reinserted, reinsert
from guardpaint.store.seeds import derive
from guardpaint.types import Audit, Draft, Edit, Region
from guardpaint.verify.passes import Work


@dataclass(frozen=True)
class Confirmed:
    """The result of a step's audits: the finest audit, the finding, and the records of all audits."""

    audit: Audit
    finding: Finding | None
    records: tuple[AuditRecord, ...]


@dataclass(frozen=True)
class StepResult:
    """What one audited step decided."""

    finding: Finding | None = None
    """The reason of the trigger. None if the step is benign or the full decode did not confirm the trigger."""
    suspect: Bool[Tensor, "h w"] | None = None
    """The area that the trigger points to; None if no region was found."""
    repair: Repair | None = None
    """The accepted repair. None keeps the control, bit for bit."""


def run_step(context: StepContext, first: Audit) -> Work[StepResult]:
    """Run one audited step, given its first audit."""
    confirmed = yield from confirm(context, first)
    if confirmed.finding is None or context.parts.config.mode == "monitor":
        return StepResult(confirmed.finding)
    return (yield from repair(context, confirmed.audit, confirmed.finding, RepairPlan.usual(context.parts)))


def confirm(context: StepContext, first: Audit) -> Work[Confirmed]:
    """Add a fine audit if the first one triggers, is in the uncertainty band, or the picture was edited before."""
    parts, view = context.parts, context.view
    audit = first
    finding, record = context.found(first, view.path(first.pixels))
    records = [record]
    unsure = finding is not None or first.adv_prob >= parts.policy.trigger - parts.config.band
    both = view.exact and context.edited
    if ((parts.config.resolution == "adaptive" and unsure) or both) and first.pixels != parts.fine_size:
        audit = yield from context.seen(view, parts.fine_size)
        finer, record = context.found(audit, view.path(audit.pixels))
        records.append(record)
        finding = finer or (finding if both else None)  # an edited picture must pass at both sizes
    if finding is not None:
        context.writer.triggered(finding)
    return Confirmed(audit, finding, tuple(records))


def repair(context: StepContext, audit: Audit, finding: Finding, plan: RepairPlan) -> Work[StepResult]:
    """Mine regions and play a tournament on each, from the control that the one before has left.

    If every region fails, one more tournament is played on their union.
    """
    writer, view, draft = context.writer, context.view, context.draft
    if draft is None:
        return StepResult(finding)
    if context.prompt is None:
        writer.note("repair refused: no prompt text, so F is unavailable; pass safety_prompt=")
        return StepResult(finding)
    with writer.clock("view"):
        control = view.full()
    if not (view.exact and audit.pixels == context.parts.fine_size):
        audit = yield from context.seen(PixelView(control), context.parts.fine_size)
        confirmed, _ = context.found(audit, view.repair_decoder)
        if confirmed is None and draft.step + 1 < draft.steps and not view.exact:
            writer.unconfirmed()
            return StepResult()
    regions = unsafe_regions(context, audit, finding, control)
    writer.regions(len(regions))
    if not regions:
        writer.note("flagged, but the heat map shows no region to repair")
        return StepResult(finding)
    writer.control(control)
    explain(context, control, finding.category)
    start = Repair(control, torch.zeros(control.shape[-2:]), audit)
    turn = Turn(context, finding.category, plan, start)
    config = context.parts.config
    together, pruned = config.regions_together == "on" and len(regions) > 1, plan.prune and config.keep > 0
    if together and pruned:
        writer.note("regions are repaired in turn, because `keep` prunes candidates one tournament at a time")
    if together and not pruned:
        accepted = yield from regions_together(turn, regions)
    else:
        accepted = yield from regions_in_turn(turn, regions)
    if accepted is None and len(regions) > 1:
        won = yield from turn.play(turn.control(None), union(regions), "union")
        accepted = won
    return StepResult(finding, union(regions).mask, accepted)


def unsafe_regions(context: StepContext, audit: Audit, finding: Finding, view: Float[Tensor, "3 h w"]) -> list[Region]:
    """Unsafe regions of a view, from the heat map that the configuration names."""
    config = context.parts.config
    heat = audit.adv_map if config.heat_map == "adv" else audit.class_maps[finding.category]
    return mine(heat, (int(view.shape[-2]), int(view.shape[-1])), config, context.progress)


def reinsert_repair(context: StepContext, won: Repair, family: Family) -> tuple[Reinserted, Edit]:
    """Encode the winner with the base's VAE and put it into the live latent, inside the mask only."""
    config, draft = context.parts.config, context.draft
    assert draft is not None
    edit = edit_of(won, draft)
    alpha = 1.0 - draft.after.noise if config.blend_alpha == "one_minus_noise" else 0.30 + 0.60 * draft.progress
    seed = derive(context.seed, context.image, draft.step)
    result = reinsert(config.reinsertion, draft, edit, family, hold=config.hold, alpha=alpha, seed=seed)
    if not torch.isfinite(result.latent).all():
        raise NotFinite(f"the reinsertion rule {result.rule} made NaN or infinity")
    context.writer.reinserted(
        {
            "rule": result.rule,
            "asked": config.reinsertion,
            "note": result.note,
            "hold": result.hold,
            "coverage": float(edit.mask.mean()),
            "change_inside": float((result.latent - draft.latent).abs().sum() / edit.mask.sum().clamp_min(1e-9)),
        }
    )
    return result, edit


def edit_of(won: Repair, draft: Draft) -> Edit:
    """A repair at latent size: its view encoded by the base's VAE, and its mask."""
    size = (int(draft.latent.shape[-2]), int(draft.latent.shape[-1]))
    z0 = draft.base.encode(won.view, size).to(draft.latent)
    return Edit(z0, latent_mask(won.mask, size).to(draft.latent))


def explain(context: StepContext, control: Float[Tensor, "3 h w"], category: str) -> None:
    """Keep a Grad-CAM of the flagged category as evidence for operators, if evidence is retained."""
    auditor = context.parts.auditor
    if not (context.parts.config.retain_evidence and isinstance(auditor, AuditorScorer)):
        return
    view = shrink(control, auditor.sizes[1])
    try:
        cam = grad_cam(auditor, view, category, context.prompt or "", context.view.noise)
    except Exception as error:  # a failed explanation must not change the decision
        context.writer.note(f"no Grad-CAM: {type(error).__name__}: {error}")
        return
    context.writer.control(control, cam, why=category)
