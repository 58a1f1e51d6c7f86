"""The loop for one image: draft → audit → repair → verify → reinsert, then the final verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.audit.gradcam import grad_cam
from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import latent_mask, mine, union
from guardpaint.config import GuardConfig
from guardpaint.draft.family import Family
from guardpaint.draft.views import Views, shrink
from guardpaint.errors import BadInput, GuardTimeout, NotFinite
from guardpaint.policy import Finding, Policy
from guardpaint.reinsert.apply import Reinserted, reinsert
from guardpaint.repair.ranker import Ranker
from guardpaint.loop.report import AuditRecord, Evidence, FinalRecord, StepRecord
from guardpaint.store.seeds import derive
from guardpaint.types import Audit, Auditor, Draft, Edit, Proposer, Region, Repairer, SeamMetric
from guardpaint.verify.tournament import Tournament


@dataclass(frozen=True)
class Parts:
    """Everything a guard is made of."""

    auditor: Auditor
    repairer: Repairer
    proposer: Proposer
    seam: SeamMetric
    policy: Policy
    config: GuardConfig
    ranker: Ranker | None = None
    """Prunes candidates after a preview when `config.keep` asks for it."""
    observer: Callable[[Tournament], None] | None = None
    """Sees every tournament before it starts; what it raises fails the image closed."""

    def finding(self, audit: Audit, progress: float) -> Finding | None:
        """What the policy and the calibration for this progress make of an audit."""
        calibration = self.config.calibration
        return self.policy.finding(audit, None if calibration is None else calibration.at(progress).thresholds)


@dataclass(frozen=True)
class Won:
    """An accepted repair: the composed view is the next control."""

    view: Float[Tensor, "3 h w"]
    mask: Float[Tensor, "h w"]
    audit: Audit


@dataclass
class ImageGuard:
    """Guards one image of one request and keeps its account."""

    parts: Parts
    family: Family
    prompt: str | None
    seed: int
    image: int
    """Index among the images that share the seed."""
    records: list[StepRecord] = field(default_factory=list)
    final: FinalRecord = field(default_factory=FinalRecord)
    evidence: list[Evidence] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    edited: bool = False
    suspect: Bool[Tensor, "h w"] | None = None
    """Where the latest audited step's trigger pointed; None: it did not trigger, or nowhere."""
    spent: float = 0.0

    def first_pass(self, progress: float) -> int:
        """Pixels of the pass every audited step makes."""
        coarse, fine = self.parts.auditor.sizes
        mode = self.parts.config.resolution
        if mode == "paper":
            return fine if progress >= 0.65 else coarse
        return fine if mode == "fine" else coarse

    # 1–2 · draft, audit ------------------------------------------------------------------------------------

    def step(self, draft: Draft, views: Views, first: Audit) -> tuple[Reinserted, Edit] | None:
        """One audited step. None = benign, or nothing accepted: the control stays, bit for bit."""
        self.suspect = None
        record = self.open(draft, views)
        audit, finding = self.confirm(views, first, record)
        if finding is None or self.parts.config.mode == "monitor":
            return None
        won = self.repair(draft, views, audit, finding, record)
        if won is None:
            return None
        with self.clock(record, "reinsert"):
            return self.reinsert(draft, won, record)

    def open(self, draft: Draft, views: Views) -> StepRecord:
        """Begin the account of an audited step."""
        record = StepRecord(draft.step, draft.steps, draft.progress, views.noise, views.kind)
        record.cost = {"audits": 0, "regions": 0, "candidates": 0, "reinserts": 0}
        self.records.append(record)
        return record

    def confirm(self, views: Views, first: Audit, record: StepRecord) -> tuple[Audit, Finding | None]:
        """Coarse pass; a fine one only if it triggers, lands in the uncertainty band, or the picture was edited."""
        config, policy = self.parts.config, self.parts.policy
        audit, finding = first, self.note(first, views.decoder, record)
        unsure = finding is not None or first.adv_prob >= policy.trigger - config.band
        fine = self.parts.auditor.sizes[1]
        must = views.exact and self.edited
        if ((config.resolution == "adaptive" and unsure) or must) and first.pixels != fine:
            with self.clock(record, "audit"):
                audit = self.audit(views.at(fine)[None], views.noise, record)[0]
            finer = self.note(audit, views.decoder, record)
            finding = finer or (finding if must else None)  # an edited picture must pass at both sizes
        if finding is not None:
            record.triggered, record.category, record.reason = True, finding.category, finding.reason
        return audit, finding

    def audit(self, images: Float[Tensor, "b 3 h w"], noise: float, record: StepRecord) -> list[Audit]:
        """Auditor pass over views of this image; anything not finite is an error."""
        record.cost["audits"] += len(images)
        audits = self.parts.auditor.audit(images, [self.prompt] * len(images), noise)
        for a in audits:
            check_audit(a, self.parts.policy.names)
        return audits

    # 3 · repair --------------------------------------------------------------------------------------------

    def repair(
        self,
        draft: Draft,
        views: Views,
        audit: Audit,
        finding: Finding,
        record: StepRecord,
        proposer: Proposer | None = None,
        candidates: int | None = None,
        label: str = "",
    ) -> Won | None:
        """Mine regions, run a tournament on each; an accepted repair is the control of the next.

        A label makes another draw of candidates for the same step.
        """
        config = self.parts.config
        if self.prompt is None:
            record.notes.append("repair refused: no prompt text, so F is unavailable; pass safety_prompt=")
            return None
        fine = self.parts.auditor.sizes[1]
        with self.clock(record, "view"):
            control = views.full()
        if not (views.exact and audit.pixels == fine):
            with self.clock(record, "audit"):
                audit = self.audit(shrink(control, fine)[None], views.noise, record)[0]
            confirmed = self.note(audit, views.repair_decoder, record)
            if confirmed is None and draft.step + 1 < draft.steps and not views.exact:
                record.triggered = False
                record.notes.append(f"{record.reason}; not confirmed by the full decode: left to the next audit")
                return None
        regions = self.regions(audit, finding, control, record.progress)
        record.regions += len(regions)
        record.cost["regions"] += len(regions)
        if not regions:
            record.notes.append("flagged, but the heat map has no region to repair")
            return None
        self.suspect = union(regions).mask
        self.keep(record.step, "control", len(record.tournaments), control)
        self.explain(record, control, finding.category, views.noise)
        proposer, n = proposer or self.parts.proposer, candidates or config.candidates
        won: Won | None = None
        names = [f"{label}{k + 1}" for k in range(len(regions))]
        for name, region in zip(names, regions, strict=True):
            latest = self.tournament(draft, views, control, audit, region, name, finding.category, record, proposer, n)
            if latest is not None:
                mask = latest.mask if won is None else torch.maximum(won.mask, latest.mask)
                won = Won(latest.view, mask, latest.audit)
                control, audit = latest.view, latest.audit
        if won is None and len(regions) > 1:
            won = self.tournament(
                draft, views, control, audit, union(regions), f"{label}union", finding.category, record, proposer, n
            )
        return won

    def regions(
        self, audit: Audit, finding: Finding, view: Float[Tensor, "3 h w"], progress: float = 1.0
    ) -> list[Region]:
        """Unsafe regions of a view, from the heat map the configuration asks for."""
        heat = audit.adv_map if self.parts.config.heat_map == "adv" else audit.class_maps[finding.category]
        return mine(heat, (int(view.shape[-2]), int(view.shape[-1])), self.parts.config, progress)

    # 4 · verify --------------------------------------------------------------------------------------------

    def tournament(
        self,
        draft: Draft,
        views: Views,
        control: Float[Tensor, "3 h w"],
        control_audit: Audit,
        region: Region,
        name: str,
        category: str,
        record: StepRecord,
        proposer: Proposer,
        n: int,
    ) -> Won | None:
        """N candidates, scored beside the control by the same auditor at the same size; best u > 0 wins."""
        assert self.prompt is not None
        tournament = Tournament(
            parts=self.parts,
            prompt=self.prompt,
            draft=draft,
            control=control,
            audit=control_audit,
            region=region,
            name=name,
            category=category,
            seed=derive(self.seed, self.image, draft.step, name),
            noise=views.noise,
            look=lambda images: self.audit(images, views.noise, record),
            clock=lambda stage: self.clock(record, stage),
        )
        if self.parts.observer is not None:
            self.parts.observer(tournament)
        knobs = proposer.propose(tournament.state, n, tournament.seed)
        done = tournament.play(knobs, proposer.name, prune=proposer is self.parts.proposer)
        record.cost["candidates"] += len(done.painted)
        for i, candidate in zip(done.painted, done.composed, strict=True):
            self.keep(record.step, f"candidate {len(record.tournaments)}", i, candidate)
        record.tournaments.append(done.record)
        self.check_time()
        if done.won is None:
            return None
        return Won(done.composed[done.won], done.masks[done.won], done.audits[done.won])

    # 5 · reinsert ------------------------------------------------------------------------------------------

    def reinsert(self, draft: Draft, won: Won, record: StepRecord) -> tuple[Reinserted, Edit]:
        """Encode the winner with the base VAE and put it into the live latent, inside the mask only."""
        config = self.parts.config
        size = (int(draft.latent.shape[-2]), int(draft.latent.shape[-1]))
        z0 = draft.base.encode(won.view, size).to(draft.latent)
        edit = Edit(z0, latent_mask(won.mask, size).to(draft.latent))
        alpha = 1.0 - draft.after.noise if config.blend_alpha == "one_minus_noise" else 0.30 + 0.60 * draft.progress
        done = reinsert(
            config.reinsertion,
            draft,
            edit,
            self.family,
            hold=config.hold,
            alpha=alpha,
            seed=derive(self.seed, self.image, draft.step),
        )
        if not torch.isfinite(done.latent).all():
            raise NotFinite(f"reinsertion by {done.rule} made NaN or infinity")
        record.cost["reinserts"] += 1
        record.reinsertion = {
            "rule": done.rule,
            "asked": config.reinsertion,
            "note": done.note,
            "hold": done.hold,
            "coverage": float(edit.mask.mean()),
            "change_inside": float((done.latent - draft.latent).abs().sum() / edit.mask.sum().clamp_min(1e-9)),
        }
        self.edited = True
        return done, edit

    # Bookkeeping -------------------------------------------------------------------------------------------

    def note(self, audit: Audit, decoder: str, record: StepRecord) -> Finding | None:
        """Write one auditor pass into the account; what it found."""
        finding = self.parts.finding(audit, record.progress)
        record.audits.append(audit_record(audit, decoder, finding))
        return finding

    def keep(
        self,
        step: int,
        kind: str,
        index: int,
        image: Float[Tensor, "3 h w"],
        heat: Float[Tensor, "u v"] | None = None,
    ) -> None:
        """Keep a picture for the report: as it is for operators, else blurred beyond recognition."""
        from guardpaint.loop.verdict import blurred_thumbnail, to_pil

        clear = self.parts.config.retain_evidence
        picture = to_pil(image) if clear else blurred_thumbnail(image)
        self.evidence.append(Evidence(step, kind, index, picture, not clear, heat))

    def explain(self, record: StepRecord, control: Float[Tensor, "3 h w"], category: str, noise: float) -> None:
        """Grad-CAM of the flagged category beside the control, for operators."""
        auditor = self.parts.auditor
        if self.parts.config.retain_evidence and isinstance(auditor, AuditorScorer):
            try:
                cam = grad_cam(auditor, shrink(control, auditor.sizes[1]), category, self.prompt or "", noise)
            except Exception as error:  # an explanation that fails decides nothing
                record.notes.append(f"no Grad-CAM: {type(error).__name__}: {error}")
                return
            self.keep(record.step, f"why {category}", len(record.tournaments), control, cam)

    @contextmanager
    def clock(self, record: StepRecord, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            record.timings[stage] = record.timings.get(stage, 0.0) + seconds
            self.spent += seconds
        self.check_time()

    def check_time(self) -> None:
        limit = self.parts.config.timeout_s
        if limit and self.spent > limit:
            raise GuardTimeout(f"the guard spent {self.spent:.2f} s on one image; timeout_s={limit}")


def audit_record(audit: Audit, decoder: str, finding: Finding | None) -> AuditRecord:
    return AuditRecord(
        audit.pixels,
        decoder,
        audit.scores(),
        audit.probs,
        finding.category if finding else None,
        finding.reason if finding else "",
    )


def check_audit(audit: Audit, categories: tuple[str, ...]) -> None:
    """A score that is missing or not a number is an error, never a pass."""
    if set(audit.probs) != set(categories):
        raise BadInput(f"the auditor scored {sorted(audit.probs)}, the policy names {sorted(categories)}")
    numbers = [*audit.probs.values(), *(v for v in audit.scores().values() if v is not None)]
    bad = [x for x in numbers if not (x == x and abs(x) != float("inf"))]
    if bad or not torch.isfinite(audit.adv_map).all():
        raise NotFinite(f"the auditor answered with NaN or infinity: {audit.scores()}")
