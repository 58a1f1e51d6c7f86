"""Writes the records of a report. The loop only writes them and never reads them back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.errors import GuardTimeout
from guardpaint.loop.evidence import KEPT_SIDE, Evidence
from guardpaint.loop.pictures import blurred_thumbnail
from guardpaint.loop.report import ApprovalRecord, AuditRecord, FinalRecord, GlanceRecord, StepRecord
from guardpaint.policy import Finding
from guardpaint.store.images import to_pil
from guardpaint.types import Audit, Draft, JsonDict
from guardpaint.verify.tournament import TournamentResult


@dataclass
class Recorder:
    """Collects the records of one image and the time the guard spends on it."""

    clear: bool = False
    """Whether pictures are kept as they are, for operators, or blurred beyond recognition."""
    limit: float = 0.0
    """Seconds that the guard may spend on the image; 0 means no limit."""
    steps: list[StepRecord] = field(default_factory=list)
    final: FinalRecord = field(default_factory=FinalRecord)
    glances: list[GlanceRecord] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    painted: Bool[Tensor, "h w"] | None = None
    """Where accepted candidates were painted, at the size of the picture."""
    spent: float = 0.0

    def open(self, draft: Draft | None, kind: str, noise: float) -> StepWriter:
        """Begin the record of an audited step. Without a draft, no step was seen and the record is not kept."""
        if draft is None:
            return StepWriter(self, StepRecord(0, 0, 1.0, noise, kind))
        record = StepRecord(draft.step, draft.steps, draft.progress, noise, kind)
        self.steps.append(record)
        return StepWriter(self, record)

    def spend(self, seconds: float) -> None:
        """Add to the guard's time; raises GuardTimeout if that is over the limit."""
        self.spent += seconds
        self.check_time()

    def check_time(self) -> None:
        """Raise GuardTimeout if the guard has spent more than its limit."""
        if self.limit and self.spent > self.limit:
            raise GuardTimeout(f"the guard spent {self.spent:.2f} s on one image, over timeout_s={self.limit}")

    def finish(
        self,
        verdict: str,
        audits: Sequence[AuditRecord],
        ladder: Sequence[JsonDict],
        approvals: Sequence[ApprovalRecord],
    ) -> None:
        """Write the final verdict; called when it is known what is released."""
        self.final = FinalRecord(verdict, list(audits), list(ladder), list(approvals))


@dataclass(frozen=True)
class StepWriter:
    """Writes the record of one audited step."""

    recorder: Recorder
    record: StepRecord

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Add the time of a with block to a stage; raises GuardTimeout if the image is over its limit."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.record.timings[stage] = self.record.timings.get(stage, 0.0) + seconds
            self.recorder.spent += seconds
        self.recorder.check_time()

    def took(self, stage: str, seconds: float) -> None:
        """Add this image's share of a pass to a stage; raises GuardTimeout if the image is over its limit."""
        self.record.timings[stage] = self.record.timings.get(stage, 0.0) + seconds
        self.recorder.spend(seconds)

    def first_pass(self, seconds: float) -> None:
        """Record this image's share of the first audit, which runs over the whole batch."""
        self.record.timings["first_pass"] = seconds
        self.record.cost["audits"] += 1
        self.recorder.spend(seconds)

    def glanced(self) -> None:
        """Record that a glance scheduled this audit."""
        self.record.cost["glances"] = 1
        self.note("audited because of a glance at this step")

    def looked(self, count: int) -> None:
        """Count views that the auditor scored."""
        self.record.cost["audits"] += count

    def audit(self, audit: Audit, decoder: str, finding: Finding | None) -> AuditRecord:
        """Record one auditor pass and its finding."""
        flagged, reason = (finding.category, finding.reason) if finding else (None, "")
        row = AuditRecord(audit.pixels, decoder, audit.scores(), audit.probs, flagged, reason)
        if audit.tiles:
            worst = min(audit.tiles, key=lambda v: v.audit.safety)
            row.tiles = len(audit.tiles) - 1
            row.tile = None if worst is audit.tiles[0] else astuple(worst.tile)
        self.record.audits.append(row)
        return row

    def triggered(self, finding: Finding) -> None:
        self.record.triggered, self.record.category, self.record.reason = True, finding.category, finding.reason

    def unconfirmed(self) -> None:
        """Take the trigger back, because the full decode does not show what the cheaper view did."""
        self.record.triggered = False
        self.note(f"{self.record.reason}; not confirmed by the full decode, left to the next audit")

    def regions(self, count: int) -> None:
        self.record.regions += count
        self.record.cost["regions"] += count

    def tournament(self, result: TournamentResult, painted: int | None = None) -> None:
        """Record a finished tournament with pictures of its candidates, `painted` of which were painted for it."""
        for i, candidate in zip(result.painted, result.composed, strict=True):
            self.picture(f"candidate {len(self.record.tournaments)}", i, candidate)
        self.record.cost["candidates"] += len(result.painted) if painted is None else painted
        self.record.tournaments.append(result.record)
        if result.won is not None:
            mask, earlier = (result.masks[result.won] > 0).cpu(), self.recorder.painted
            same = earlier is not None and earlier.shape == mask.shape
            self.recorder.painted = mask | earlier if earlier is not None and same else mask
        self.recorder.check_time()

    def reinserted(self, how: JsonDict) -> None:
        """Record that an accepted repair was put into the live latent."""
        self.record.reinsertion = how
        self.record.cost["reinserts"] += 1

    def composed(self) -> None:
        """Record that a repair of the finished picture is part of what is released."""
        note = "finished picture: composed in pixels"
        self.record.reinsertion = {"rule": "composed", "asked": "composed", "note": note}

    def note(self, text: str) -> None:
        self.record.notes.append(text)

    def control(self, image: Float[Tensor, "3 h w"], heat: Tensor | None = None, why: str = "") -> None:
        """Keep the picture a tournament starts from; with `why`, the Grad-CAM of that category over it."""
        kind = f"why {why}" if why else "control"
        self.picture(kind, len(self.record.tournaments), image, heat)

    def picture(self, kind: str, index: int, image: Float[Tensor, "3 h w"], heat: Tensor | None = None) -> None:
        """Keep a picture for the report, clear or blurred as the recorder says."""
        clear = self.recorder.clear
        kept = to_pil(image) if clear else blurred_thumbnail(image, KEPT_SIDE)
        own = None if heat is None else heat.clone()  # a view of it would keep the maps of a whole batch
        self.recorder.evidence.append(Evidence(self.record.step, kind, index, kept, not clear, own))
