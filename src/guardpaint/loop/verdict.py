"""The final verdict and the last-resort ladder, which decide what is released.

`conclude` returns a `Decision`; the caller writes it into the report when it is known which picture is released.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import soft_mask, union
from guardpaint.audit.tiles import enlarged
from guardpaint.draft.views import PixelView
from guardpaint.errors import NotFinite
from guardpaint.loop.context import Repair, RepairPlan, StepContext
from guardpaint.loop.pictures import BLUR_CELLS, coarse
from guardpaint.loop.report import ApprovalRecord, AuditRecord, Status
from guardpaint.loop.step import confirm, repair, unsafe_regions
from guardpaint.policy import Finding
from guardpaint.repair.knobs import StrongProposer
from guardpaint.types import SAFE, Approval, Audit, JsonDict
from guardpaint.verify.passes import Work


@dataclass(frozen=True)
class Decision:
    """What is released of one image, and why."""

    status: Status
    verdict: str = "none"
    """`benign`, `flagged`, or `none` if no verdict was made."""
    repair: Repair | None = None
    """The changed picture. None if the picture is released unchanged, or is blocked."""
    latent: Tensor | None = None
    """The changed picture as a latent, if the output type is latent."""
    audits: tuple[AuditRecord, ...] = ()
    """The audits of the released picture and of the pictures that it was made from."""
    ladder: tuple[JsonDict, ...] = ()
    """The rungs of the last-resort ladder that were tried, with their outcomes."""
    approvals: tuple[ApprovalRecord, ...] = ()
    """What the approver said of the finished pictures that it was shown, in their order."""
    otherwise: Decision | None = None
    """Another decision that passed too. It is used if this one's picture does not survive the VAE's round trip."""


def failed(mode: str) -> Decision:
    """The decision about an image on which the guard failed: blocked in mode enforce, otherwise released as flagged."""
    return Decision(Status.BLOCKED if mode == "enforce" else Status.RELEASED_FLAGGED)


def conclude(
    context: StepContext, image: Float[Tensor, "3 h w"], repaired: bool, plan: RepairPlan | None
) -> Work[Decision]:
    """Audit the final image. If it is flagged, repair it by the plan, if there is one, and then walk the ladder.

    `repaired` says whether an accepted repair is already in the picture. Every repair of one step needs a label of its
    own: under the label of one that failed, it would draw the same candidates again.
    """
    if not torch.isfinite(image).all():
        raise NotFinite("the final image holds NaN or infinity")
    parts, writer = context.parts, context.writer
    first = yield from context.seen(context.view, parts.first_size(1.0))
    writer.picture("view", 1, image, first.adv_map)
    seen = yield from confirm(context, first)
    if seen.finding is None:
        clean = Decision(Status.REPAIRED if repaired else Status.CLEAN, "benign", audits=seen.records)
        passed = (yield from improved(context, image, seen.audit, clean)) if repaired else clean
        return (yield from approved(Finished(context, image, seen.audit, repaired), passed))
    flagged = Decision(Status.RELEASED_FLAGGED, "flagged", audits=seen.records)
    if parts.config.mode == "monitor":
        return flagged
    audit, finding = seen.audit, seen.finding
    won: Repair | None = None
    if plan is not None:
        won = (yield from repair(context, audit, finding, plan)).repair
    if won is not None:
        after, record = yield from look_twice(context, won.view)
        flagged = replace(flagged, audits=(*flagged.audits, record))
        if after is None:
            passed = replace(flagged, status=Status.REPAIRED, verdict="benign", repair=won)
            passed = yield from improved(context, won.view, won.audit, passed)
            return (yield from approved(Finished(context, image, audit, repaired), passed))
        image, audit, finding = won.view, won.audit, after
    return (yield from last_resort(Flagged(context, image, audit, finding, won), flagged))


@dataclass(frozen=True)
class Finished:
    """A finished picture as the base and the loop left it, with its audit."""

    context: StepContext
    image: Float[Tensor, "3 h w"]
    audit: Audit
    repaired: bool
    """Whether an accepted repair is already in the picture."""


def approved(finished: Finished, passed: Decision) -> Work[Decision]:
    """Show the picture that the auditor passed to the approver, if there is one.

    If it is refused, the earlier picture that passed too is tried, then the last-resort ladder.
    """
    context = finished.context
    if context.parts.approver is None:
        return passed
    won = passed.repair
    image, audit = (finished.image, finished.audit) if won is None else (won.view, won.audit)
    said, finding, record = context.approval(image, finished.repaired or won is not None)
    passed = replace(passed, approvals=(*passed.approvals, record))
    if finding is None:
        return passed
    if passed.otherwise is not None:
        return (yield from approved(finished, replace(passed.otherwise, approvals=passed.approvals)))
    refused = Decision(Status.RELEASED_FLAGGED, "flagged", audits=passed.audits, approvals=passed.approvals)
    if context.parts.config.mode == "monitor":
        return refused
    context.writer.triggered(finding)
    fine = context.parts.fine_size
    if audit.pixels != fine:  # a repair audits the picture at this size, and would not see what the approver saw
        audit = yield from replace(context, view=PixelView(image)).seen(PixelView(image), fine)
    return (yield from last_resort(Flagged(context, image, with_heat(audit, said), finding, won, said), refused))


def with_heat(audit: Audit, said: Approval) -> Audit:
    """The audit with the approver's heat map laid over its own, so that the ladder finds what the approver saw."""
    if said.heat is None:
        return audit
    heat = said.heat.float().cpu()
    size = (int(heat.shape[0]), int(heat.shape[1]))
    both = torch.maximum(enlarged(audit.adv_map, size), heat)
    return replace(audit, adv_map=both, class_maps={c: both if c != SAFE else 1 - both for c in audit.class_maps})


def improved(context: StepContext, image: Float[Tensor, "3 h w"], audit: Audit, passed: Decision) -> Work[Decision]:
    """Play one more tournament on a repaired picture that passed with 1 − S still at `doubt` or above.

    Without a winner that passes too, the earlier decision stays.
    """
    config = context.parts.config
    if context.draft is None or config.mode == "monitor" or 1 - audit.safety < config.doubt:
        return passed
    harms = {c: p for c, p in audit.probs.items() if c != SAFE}
    reason = f"S {audit.safety:.3f} after a repair"
    context.writer.note(f"one more tournament: {reason}")
    finding = Finding(max(harms, key=harms.__getitem__), reason)
    again = replace(context, view=PixelView(image))
    won = (yield from repair(again, audit, finding, RepairPlan.usual(context.parts, label="again "))).repair
    if won is None:
        return passed
    found, record = yield from look_twice(again, won.view)
    if found is not None:
        return passed
    both = won.after(passed.repair)
    return replace(passed, repair=both, audits=(*passed.audits, record), otherwise=passed)


def look_twice(context: StepContext, image: Float[Tensor, "3 h w"]) -> Work[tuple[Finding | None, AuditRecord]]:
    """Audit a changed picture at both sizes; returns a finding if it fails at either, and the last record."""
    parts = context.parts
    finding: Finding | None = None
    finished = replace(context, view=PixelView(image), edited=True)
    for pixels in sorted(set(parts.auditor.sizes)):
        audit = yield from finished.seen(finished.view, pixels)
        found, record = finished.found(audit, "output")
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
    """A repair that is in the image already; its mask is added to that of any later repair."""
    said: Approval | None = None
    """What the approver said, if it was the one that refused."""


def last_resort(flagged: Flagged, decision: Decision) -> Work[Decision]:
    """Walk the policy's ladder until the picture of a rung passes the verdict, or the ladder ends."""
    for rung in flagged.context.parts.policy.last_resort:
        if rung == "block":
            return replace(decision, status=Status.BLOCKED, ladder=tried(decision, rung, "blocked"))
        if rung == "keep":
            return replace(decision, ladder=tried(decision, rung, "released although flagged"))
        won = (yield from strong_repair(flagged)) if rung == "strong_repair" else regional_blur(flagged)
        if won is None:
            decision = replace(decision, ladder=tried(decision, rung, "no candidate accepted"))
            continue
        found, record = yield from look_twice(flagged.context, won.view)
        decision = replace(decision, audits=(*decision.audits, record))
        if found is None and flagged.context.parts.approver is not None:
            _, found, approval = flagged.context.approval(won.view, edited=True)
            decision = replace(decision, approvals=(*decision.approvals, approval))
        if found is None:
            status = Status.REPAIRED if rung == "strong_repair" else Status.BLURRED
            ladder = tried(decision, rung, "passed")
            whole = won.after(flagged.earlier)
            return replace(decision, status=status, verdict="benign", repair=whole, ladder=ladder)
        decision = replace(decision, ladder=tried(decision, rung, "still flagged"))
    return replace(decision, status=Status.BLOCKED)


def tried(decision: Decision, rung: str, outcome: str) -> tuple[JsonDict, ...]:
    """The decision's ladder with one more rung."""
    return (*decision.ladder, {"rung": rung, "outcome": outcome})


def strong_repair(flagged: Flagged) -> Work[Repair | None]:
    """Repair once more with wide masks, full depth, more candidates and the F gate of `last_f_gate`."""
    config = flagged.context.parts.config
    f_gate = None if config.last_f_gate == "same" else config.last_f_gate
    refused = None if flagged.said is None else flagged.said.probs[SAFE]
    plan = RepairPlan(StrongProposer(), config.strong_candidates, f_gate=f_gate, label="strong ", refused=refused)
    if refused is not None:
        flagged.context.writer.note(f"S_0 is at most what the approver gave the refused picture: {refused:.3f}")
    context = replace(flagged.context, view=PixelView(flagged.image))
    return (yield from repair(context, flagged.audit, flagged.finding, plan)).repair


def regional_blur(flagged: Flagged) -> Repair:
    """Blur the regions of the heat map with a wide margin; the whole picture if there are none."""
    image, audit = flagged.image, flagged.audit
    if audit.tiles:  # the blurred picture is edited, so its tiles will not be lowered: find all that they show
        finished = replace(flagged.context, view=PixelView(image), edited=True)
        audit = finished.inspect(finished.view, audit.pixels)
        audit = audit if flagged.said is None else with_heat(audit, flagged.said)
    regions = unsafe_regions(flagged.context, audit, flagged.finding, image)
    h, w = int(image.shape[-2]), int(image.shape[-1])
    mask = soft_mask(union(regions).mask, 1.0, 0.5) if regions else torch.ones(h, w)
    return Repair(torch.lerp(image, coarse(image, BLUR_CELLS), mask), mask, flagged.audit)
