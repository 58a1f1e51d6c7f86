"""The final verdict and the last-resort ladder: what leaves the guard.

`conclude` returns a `Decision`; nothing is written into the report before it is known which picture is released.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import soft_mask, union
from guardpaint.draft.views import PixelView, shrink
from guardpaint.errors import NotFinite
from guardpaint.loop.pictures import BLUR_CELLS, coarse
from guardpaint.loop.report import AuditRecord, Status
from guardpaint.loop.step import Repair, RepairPlan, StepContext, confirm, repair, unsafe_regions
from guardpaint.policy import Finding
from guardpaint.repair.knobs import StrongProposer
from guardpaint.types import SAFE, Audit, JsonDict


@dataclass(frozen=True)
class Decision:
    """What to hand out, and on which grounds."""

    status: Status
    verdict: str = "none"
    """benign, flagged, or none when no verdict was made."""
    repair: Repair | None = None
    """The changed picture; None: the picture as it came, or nothing if it is blocked."""
    latent: Tensor | None = None
    """The changed picture as a latent, when latents were asked for."""
    audits: tuple[AuditRecord, ...] = ()
    """Of the picture that is released, and of those that led to it."""
    ladder: tuple[JsonDict, ...] = ()
    """The rungs of the last-resort ladder that were tried, with their outcomes."""
    otherwise: Decision | None = None
    """Another decision that passed as well: it stands if this one's picture is lost on the way out."""


def failed(mode: str) -> Decision:
    """The decision about an image on which the guard failed: blocked, or released flagged where nothing is enforced."""
    return Decision(Status.BLOCKED if mode == "enforce" else Status.RELEASED_FLAGGED)


def conclude(context: StepContext, image: Float[Tensor, "3 h w"], repaired: bool, repair_here: bool) -> Decision:
    """Verdict on the final image; repair it if the last step is an audited one; then the ladder.

    `repaired` says whether an accepted repair is already in the picture.
    """
    if not torch.isfinite(image).all():
        raise NotFinite("the final image holds NaN or infinity")
    parts, writer = context.parts, context.writer
    with writer.clock("audit"):
        first = context.look(context.view.at(parts.first_size(1.0))[None])[0]
    writer.picture("view", 1, image, first.adv_map)
    seen = confirm(context, first)
    if seen.finding is None:
        clean = Decision(Status.REPAIRED if repaired else Status.CLEAN, "benign", audits=seen.records)
        return improved(context, image, seen.audit, clean) if repaired else clean
    flagged = Decision(Status.RELEASED_FLAGGED, "flagged", audits=seen.records)
    if parts.config.mode == "monitor":
        return flagged
    audit, finding = seen.audit, seen.finding
    won: Repair | None = None
    if repair_here:
        won = repair(context, audit, finding, RepairPlan.usual(parts)).repair
    if won is not None:
        found, record = look_twice(context, won.view)
        flagged = replace(flagged, audits=(*flagged.audits, record))
        if found is None:
            passed = replace(flagged, status=Status.REPAIRED, verdict="benign", repair=won)
            return improved(context, won.view, won.audit, passed)
        image, audit, finding = won.view, won.audit, found
    return last_resort(Flagged(context, image, audit, finding, won), flagged)


def improved(context: StepContext, image: Float[Tensor, "3 h w"], audit: Audit, passed: Decision) -> Decision:
    """A repaired picture that passes, after one more tournament if harm is still rather likely.

    Passing is enough to leave: the tournament can only improve the picture, and its winner must pass as well.
    """
    config = context.parts.config
    if context.draft is None or config.mode == "monitor" or 1 - audit.safety < config.doubt:
        return passed
    harms = {c: p for c, p in audit.probs.items() if c != SAFE}
    reason = f"S {audit.safety:.3f} after a repair"
    context.writer.note(f"one more tournament: {reason}")
    finding = Finding(max(harms, key=harms.__getitem__), reason)
    again = replace(context, view=PixelView(image))
    won = repair(again, audit, finding, RepairPlan.usual(context.parts, label="again ")).repair
    if won is None:
        return passed
    found, record = look_twice(again, won.view)
    if found is not None:
        return passed
    both = won.after(passed.repair)
    return replace(passed, repair=both, audits=(*passed.audits, record), otherwise=passed)


def look_twice(context: StepContext, image: Float[Tensor, "3 h w"]) -> tuple[Finding | None, AuditRecord]:
    """Audit a changed picture at both sizes, which it must pass; returns the finding and the last record."""
    parts = context.parts
    finding: Finding | None = None
    clean = replace(context, view=PixelView(image))
    with context.writer.clock("audit"):
        for pixels in sorted(set(parts.auditor.sizes)):
            found, record = clean.found(clean.look(shrink(image, pixels)[None])[0], "output")
            finding = found or finding
    return finding, record


@dataclass(frozen=True)
class Flagged:
    """A finished picture that is still flagged."""

    context: StepContext
    image: Float[Tensor, "3 h w"]
    audit: Audit
    finding: Finding
    earlier: Repair | None = None
    """A repair that is in the image already: its mask belongs to whatever comes of it."""


def last_resort(flagged: Flagged, decision: Decision) -> Decision:
    """Walk the policy's ladder; each rung's picture must pass the verdict, or the next rung is tried."""
    for rung in flagged.context.parts.policy.last_resort:
        if rung == "block":
            return replace(decision, status=Status.BLOCKED, ladder=tried(decision, rung, "blocked"))
        if rung == "keep":
            return replace(decision, ladder=tried(decision, rung, "released although flagged"))
        won = strong_repair(flagged) if rung == "strong_repair" else regional_blur(flagged)
        if won is None:
            decision = replace(decision, ladder=tried(decision, rung, "no candidate accepted"))
            continue
        found, record = look_twice(flagged.context, won.view)
        decision = replace(decision, audits=(*decision.audits, record))
        if found is None:
            status = Status.REPAIRED if rung == "strong_repair" else Status.BLURRED
            ladder = tried(decision, rung, "passed")
            whole = won.after(flagged.earlier)
            return replace(decision, status=status, verdict="benign", repair=whole, ladder=ladder)
        decision = replace(decision, ladder=tried(decision, rung, "still flagged"))
    return replace(decision, status=Status.BLOCKED)


def tried(decision: Decision, rung: str, outcome: str) -> tuple[JsonDict, ...]:
    return (*decision.ladder, {"rung": rung, "outcome": outcome})


def strong_repair(flagged: Flagged) -> Repair | None:
    """One more round with wide masks, full depth and more candidates, under its own F gate."""
    config = flagged.context.parts.config
    f_gate = None if config.last_f_gate == "same" else config.last_f_gate
    plan = RepairPlan(StrongProposer(), config.strong_candidates, f_gate=f_gate)
    context = replace(flagged.context, view=PixelView(flagged.image))
    return repair(context, flagged.audit, flagged.finding, plan).repair


def regional_blur(flagged: Flagged) -> Repair:
    """Blur what the heat map shows, with a wide margin; the whole picture when it shows nothing."""
    image = flagged.image
    regions = unsafe_regions(flagged.context, flagged.audit, flagged.finding, image)
    h, w = int(image.shape[-2]), int(image.shape[-1])
    mask = soft_mask(union(regions).mask, 1.0, 0.5) if regions else torch.ones(h, w)
    return Repair(torch.lerp(image, coarse(image, BLUR_CELLS), mask), mask, flagged.audit)
