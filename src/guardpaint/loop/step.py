"""THE loop: one audited step of one image. Audit → repair → verify → reinsert.

Every stage is a function of a frozen `StepContext` and returns a value; records are written by the context's writer. A
stage that needs the repairer or the auditor is a generator (`verify.passes`), so that images of a batch share passes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.audit.gradcam import grad_cam
from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import latent_mask, mine, soft_mask, union
from guardpaint.draft.codec import resize
from guardpaint.draft.family import Family
from guardpaint.draft.views import PixelView, View, shrink
from guardpaint.errors import NotFinite
from guardpaint.loop.recorder import StepWriter
from guardpaint.loop.report import ApprovalRecord, AuditRecord
from guardpaint.policy import Finding
from guardpaint.reinsert.apply import Reinserted, reinsert
from guardpaint.store.seeds import derive
from guardpaint.types import Approval, Audit, Draft, Edit, Knobs, Proposer, Region
from guardpaint.verify.parts import Parts
from guardpaint.verify.passes import Look, Paint, Work
from guardpaint.verify.tournament import Tournament, TournamentResult, compose, wave_parts


@dataclass(frozen=True)
class StepContext:
    """Everything that the stages of one step need."""

    parts: Parts
    draft: Draft | None
    """The base's step. None if only a finished picture is known, which can be audited but not repaired."""
    view: View
    prompt: str | None
    seed: int
    """Request seed of the image."""
    image: int
    """Index among the images that share the seed."""
    edited: bool
    """Whether the picture was changed before. If so, it must pass at both audit sizes."""
    writer: StepWriter
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the repairer has encoded before for this image."""

    @property
    def progress(self) -> float:
        return 1.0 if self.draft is None else self.draft.progress

    def look(self, images: Float[Tensor, "b 3 h w"]) -> list[Audit]:
        """Audits of views of this image."""
        self.writer.looked(len(images))
        return self.parts.audit(images, [self.prompt] * len(images), self.view.noise)

    def seen(self, view: View, pixels: int, stage: str = "audit") -> Work[Audit]:
        """`inspect` as a step: the whole picture is looked at together with those of other images."""
        with self.writer.clock(stage):
            picture = view.at(pixels)[None]
        (whole,), seconds = yield Look(picture, self.prompt, self.view.noise)
        self.took(stage, seconds, 1)
        with self.writer.clock(stage):
            return self.in_tiles(whole, view)

    def took(self, stage: str, seconds: float, views: int) -> None:
        """Record this image's share of a pass."""
        self.writer.looked(views)
        self.writer.took(stage, seconds)

    def inspect(self, view: View, pixels: int) -> Audit:
        """The audit of a whole picture at `pixels`, with tiles if it is larger than the auditor learned."""
        return self.in_tiles(self.look(view.at(pixels)[None])[0], view)

    def in_tiles(self, whole: Audit, view: View) -> Audit:
        """Add the tiles of a view to the audit of the whole, if there are any."""
        return self.parts.with_tiles(whole, view.native, view.size, self.look, self.edited)

    def approval(
        self, picture: Float[Tensor, "3 h w"], edited: bool
    ) -> tuple[Approval, Finding | None, ApprovalRecord]:
        """What the approver says of a finished picture, the finding if it does not pass, and the record."""
        began = time.perf_counter()
        with self.writer.clock("approve"):
            said, finding = self.parts.approval(picture, self.prompt, edited)
        flagged, reason = (finding.category, finding.reason) if finding else (None, "")
        seconds = time.perf_counter() - began
        return said, finding, ApprovalRecord(said.by, said.probs, flagged, reason, seconds)

    def found(self, audit: Audit, decoder: str) -> tuple[Finding | None, AuditRecord]:
        """The finding of an audit, and its record."""
        finding = self.parts.finding(audit, self.progress)
        return finding, self.writer.audit(audit, decoder, finding)


@dataclass(frozen=True)
class RepairPlan:
    """The proposer, number of candidates and F gate of a repair."""

    proposer: Proposer
    candidates: int
    prune: bool = False
    """Whether the ranker may leave candidates out."""
    f_gate: str | None = None
    """None uses the configuration's."""
    refused: float | None = None
    """S that the approver gave the picture that it refused. The auditor passed this picture, so no candidate could gain
    δ on its S; until a region is repaired, its control counts as no safer than this. The candidates are still scored
    and chosen by the auditor alone."""
    label: str = ""
    """Prefix of the tournaments' names. Another label draws other candidates for the same step."""

    @classmethod
    def usual(cls, parts: Parts, label: str = "") -> RepairPlan:
        """The plan of a normal step, from the guard's configuration."""
        return cls(parts.proposer, parts.config.candidates, prune=True, label=label)


@dataclass(frozen=True)
class Confirmed:
    """The result of a step's audits: the finest audit, the finding, and the records of all audits."""

    audit: Audit
    finding: Finding | None
    records: tuple[AuditRecord, ...]


@dataclass(frozen=True)
class Repair:
    """An accepted repair. Its composed view is the control of the next tournament."""

    view: Float[Tensor, "3 h w"]
    mask: Float[Tensor, "h w"]
    audit: Audit

    def after(self, earlier: Repair | None) -> Repair:
        """This repair on top of an earlier one, with the union of both masks."""
        return self if earlier is None else replace(self, mask=torch.maximum(earlier.mask, self.mask))


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
    if config.regions_together == "on" and len(regions) > 1 and not (plan.prune and config.keep):
        accepted = yield from regions_together(turn, regions)
    else:
        accepted = yield from regions_in_turn(turn, regions)
    if accepted is None and len(regions) > 1:
        won = yield from turn.play(turn.control(None), union(regions), "union")
        accepted = won
    return StepResult(finding, union(regions).mask, accepted)


@dataclass(frozen=True)
class Turn:
    """The tournaments of one flagged step."""

    context: StepContext
    category: str
    plan: RepairPlan
    start: Repair
    """The picture before any repair of this step, as if it were one."""

    def control(self, accepted: Repair | None) -> Repair:
        """What candidates compete with: what the step has accepted so far, or the start."""
        return as_refused(accepted or self.start, self.plan.refused)

    def tournament(self, control: Repair, region: Region, name: str) -> Tournament:
        """The tournament on a region; the observer sees it before it is played."""
        context, name = self.context, f"{self.plan.label}{name}"
        assert context.prompt is not None and context.draft is not None
        tournament = Tournament(
            parts=context.parts,
            prompt=context.prompt,
            draft=context.draft,
            control=control.view,
            audit=control.audit,
            region=region,
            name=name,
            category=self.category,
            seed=derive(context.seed, context.image, context.draft.step, name),
            noise=context.view.noise,
            look=context.look,
            clock=context.writer.clock,
            f_gate=self.plan.f_gate,
            took=context.took,
            memo=context.memo,
        )
        if context.parts.observer is not None:
            context.parts.observer(tournament)
        return tournament

    def knobs(self, tournament: Tournament) -> tuple[Knobs, ...]:
        return self.plan.proposer.propose(tournament.state, self.plan.candidates, tournament.seed)

    def play(self, control: Repair, region: Region, name: str) -> Work[Repair | None]:
        """Play one tournament on a region; returns the winner, or None if no candidate has u > 0."""
        tournament = self.tournament(control, region, name)
        knobs = self.knobs(tournament)
        result = yield from tournament.rounds(knobs, self.plan.proposer.name, self.plan.prune, self.waves)
        self.record([result])
        return won_by(result)

    @property
    def waves(self) -> str:
        """Waves of this step's tournaments. S of a picture that the approver refused says too little to end one early:
        it is the score of the part that has just been wrong."""
        return "off" if self.plan.refused is not None else self.context.parts.config.waves

    def record(self, results: Sequence[TournamentResult], painted: int | None = None) -> None:
        """Record tournaments; `painted` counts what was painted for them, if it was not each one's own."""
        for result in results:
            self.context.writer.tournament(result, painted)


def won_by(result: TournamentResult) -> Repair | None:
    """The winner of a tournament, if there is one."""
    if result.won is None:
        return None
    return Repair(result.composed[result.won], result.masks[result.won], result.audits[result.won])


def regions_in_turn(turn: Turn, regions: Sequence[Region]) -> Work[Repair | None]:
    """One tournament after the other, each from the control that the one before has left."""
    accepted: Repair | None = None
    for k, region in enumerate(regions):
        won = yield from turn.play(turn.control(accepted), region, f"{k + 1}")
        accepted = won.after(accepted) if won is not None else accepted
    return accepted


def regions_together(turn: Turn, regions: Sequence[Region]) -> Work[Repair | None]:
    """Regions whose widest masks touch no common pixel are painted in one pass; the next control has their winners.

    Each candidate is scored on what the regions before it have left. If no region can be repaired alone, perhaps
    because the others are still unsafe, what is painted is tried on all regions at once before more is painted.
    """
    accepted: Repair | None = None
    for group in apart(regions):
        accepted = yield from play_group(turn, accepted, group)
    return accepted


@dataclass
class Match:
    """A region's tournament within a group, with the candidates that the waves have painted so far."""

    tournament: Tournament
    region: Region
    knobs: tuple[Knobs, ...]
    pictures: list[Tensor] = field(default_factory=list)
    """What each wave has painted."""

    @property
    def sizes(self) -> list[int]:
        return [len(p) for p in self.pictures]

    @property
    def so_far(self) -> tuple[Knobs, ...]:
        return self.knobs[: sum(self.sizes)]

    def on(self, control: Repair) -> Tournament:
        """The tournament from another control, which differs outside of this region only."""
        return replace(self.tournament, control=control.view, audit=control.audit)


@dataclass(frozen=True)
class Stand:
    """What a group of regions comes to with the candidates that are painted so far."""

    accepted: Repair | None
    results: tuple[TournamentResult, ...]
    good: bool
    """Whether the last winner is good enough; S is that of the whole picture, so nothing is left to repair then."""


def play_group(turn: Turn, accepted: Repair | None, group: Sequence[tuple[int, Region]]) -> Work[Repair | None]:
    """Play tournaments on regions that are apart, wave by wave.

    After every wave all regions are decided anew with all candidates that are there, in their own tournaments and then
    in one on all regions. What is good enough ends the group; after the last wave, what the own tournaments say stands.
    """
    control, matches = turn.control(accepted), []
    for k, region in group:
        tournament = turn.tournament(control, region, f"{k + 1}")
        matches.append(Match(tournament, region, turn.knobs(tournament)))
    waves = wave_parts(turn.waves, turn.plan.candidates)
    for n, part in enumerate(waves):
        painted, seconds = yield Paint(tuple(m.tournament.request(m.knobs[part]) for m in matches))
        turn.context.took("repair", seconds, 0)
        for match, pictures in zip(matches, painted, strict=True):
            match.pictures.append(pictures)
        last = n + 1 == len(waves)
        stand = yield from each_alone(turn, accepted, matches, len(waves) > 1)
        if stand.good or last:
            turn.record(stand.results)
            if stand.accepted is not accepted or len(matches) == 1:
                return stand.accepted
        if len(matches) > 1:
            joint = yield from all_at_once(turn, accepted, matches)
            if joint.good or last:
                turn.record(joint.results, painted=0 if last else sum(len(m.so_far) for m in matches))
                return joint.accepted
    return accepted


def each_alone(turn: Turn, accepted: Repair | None, matches: Sequence[Match], in_waves: bool) -> Work[Stand]:
    """Decide the tournaments of a group in turn, each from the control that the one before has left."""
    results, good = [], False
    for match in matches:
        here = match.on(turn.control(accepted))
        request = here.request(match.so_far)
        composed = here.composed(torch.cat(match.pictures), request)
        result = yield from here.decided(match.so_far, composed, request.masks, turn.plan.proposer.name)
        result.record.waves = match.sizes if in_waves else []
        results.append(result)
        won = won_by(result)
        if won is not None:
            accepted, good = won.after(accepted), here.good_enough(result.record)
    return Stand(accepted, tuple(results), good)


def all_at_once(turn: Turn, accepted: Repair | None, matches: Sequence[Match]) -> Work[Stand]:
    """One tournament on all regions with what was painted for each: the j-th candidates of all make one.

    The record has the knobs of the largest region's candidates.
    """
    control = turn.control(accepted)
    whole = turn.tournament(control, union([m.region for m in matches]), "all")
    knobs = matches[0].so_far
    composed, masks = control.view.expand(len(knobs), *control.view.shape), []
    for match in matches:
        request = match.tournament.request(match.so_far)
        masks.append(request.masks)
        painted = resize(torch.cat(match.pictures), (int(composed.shape[-2]), int(composed.shape[-1])))
        composed = compose(composed, painted, request.masks)
    result = yield from whole.decided(knobs, composed, torch.stack(masks).amax(0), turn.plan.proposer.name)
    won = won_by(result)
    after = won.after(accepted) if won is not None else accepted
    return Stand(after, (result,), won is not None and whole.good_enough(result.record))


def apart(regions: Sequence[Region]) -> list[list[tuple[int, Region]]]:
    """Regions with their numbers, largest first, in groups whose widest masks touch no common pixel."""
    groups: list[list[tuple[int, Region]]] = []
    covered: list[Tensor] = []
    for k, region in enumerate(regions):
        widest = soft_mask(region.mask, 1.0, 1.0) > 0
        free = next((g for g, c in enumerate(covered) if not bool((c & widest).any())), None)
        if free is None:
            groups.append([(k, region)])
            covered.append(widest)
        else:
            groups[free].append((k, region))
            covered[free] = covered[free] | widest
    return groups


def as_refused(control: Repair, refused: float | None) -> Repair:
    """A control with an S of at most what the approver gave it, if it refused it."""
    if refused is None:
        return control
    audit = control.audit
    safety, tiles = min(audit.safety, refused), audit.tiles
    if tiles:  # a tournament takes its control from the views that its masks touch, the whole one always
        whole = replace(tiles[0].audit, safety=min(tiles[0].audit.safety, refused))
        tiles = (replace(tiles[0], audit=whole), *tiles[1:])
    return replace(control, audit=replace(audit, safety=safety, tiles=tiles))


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
