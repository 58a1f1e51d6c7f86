"""The one writer of records: what happened to an image is written here, and nothing in the loop reads it back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from guardpaint.errors import GuardTimeout
from guardpaint.loop.evidence import Evidence
from guardpaint.loop.pictures import blurred_thumbnail
from guardpaint.loop.report import AuditRecord, FinalRecord, StepRecord
from guardpaint.policy import Finding
from guardpaint.store.images import to_pil
from guardpaint.types import Audit, Draft, JsonDict
from guardpaint.verify.tournament import TournamentResult


@dataclass
class Recorder:
    """Writes the records of one image and keeps its time."""

    clear: bool = False
    """Keep pictures as they are, for operators; otherwise blurred beyond recognition."""
    limit: float = 0.0
    """Guard seconds allowed; 0: no limit."""
    steps: list[StepRecord] = field(default_factory=list)
    final: FinalRecord = field(default_factory=FinalRecord)
    evidence: list[Evidence] = field(default_factory=list)
    spent: float = 0.0

    def open(self, draft: Draft | None, kind: str, noise: float) -> StepWriter:
        """Begin the record of an audited step; without a draft (no step was seen) it is kept apart."""
        if draft is None:
            return StepWriter(self, StepRecord(0, 0, 1.0, noise, kind))
        record = StepRecord(draft.step, draft.steps, draft.progress, noise, kind)
        self.steps.append(record)
        return StepWriter(self, record)

    def spend(self, seconds: float) -> None:
        """Add guard time; raises when the image has used up its limit."""
        self.spent += seconds
        self.check_time()

    def check_time(self) -> None:
        if self.limit and self.spent > self.limit:
            raise GuardTimeout(f"the guard spent {self.spent:.2f} s on one image; timeout_s={self.limit}")

    def finish(self, verdict: str, audits: Sequence[AuditRecord], ladder: Sequence[JsonDict]) -> None:
        """Write the final verdict, once it is known what is released."""
        self.final = FinalRecord(verdict, list(audits), list(ladder))


@dataclass(frozen=True)
class StepWriter:
    """Writes the record of one audited step."""

    recorder: Recorder
    record: StepRecord

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Time a stage; raises when the image has used up its time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.record.timings[stage] = self.record.timings.get(stage, 0.0) + seconds
            self.recorder.spent += seconds
        self.recorder.check_time()

    def first_pass(self, seconds: float) -> None:
        """This image's share of the pass over the whole batch."""
        self.record.timings["first_pass"] = seconds
        self.record.cost["audits"] += 1
        self.recorder.spend(seconds)

    def looked(self, count: int) -> None:
        """The auditor saw so many views."""
        self.record.cost["audits"] += count

    def audit(self, audit: Audit, decoder: str, finding: Finding | None) -> AuditRecord:
        """One auditor pass and what was found in it."""
        flagged, reason = (finding.category, finding.reason) if finding else (None, "")
        written = AuditRecord(audit.pixels, decoder, audit.scores(), audit.probs, flagged, reason)
        self.record.audits.append(written)
        return written

    def triggered(self, finding: Finding) -> None:
        self.record.triggered, self.record.category, self.record.reason = True, finding.category, finding.reason

    def unconfirmed(self) -> None:
        """The full decode does not show what the cheaper view did."""
        self.record.triggered = False
        self.note(f"{self.record.reason}; not confirmed by the full decode: left to the next audit")

    def regions(self, count: int) -> None:
        self.record.regions += count
        self.record.cost["regions"] += count

    def tournament(self, result: TournamentResult) -> None:
        """A finished tournament with pictures of its candidates."""
        for i, candidate in zip(result.painted, result.composed, strict=True):
            self.picture(f"candidate {len(self.record.tournaments)}", i, candidate)
        self.record.cost["candidates"] += len(result.painted)
        self.record.tournaments.append(result.record)
        self.recorder.check_time()

    def reinserted(self, how: JsonDict) -> None:
        """An accepted repair went into the live latent."""
        self.record.reinsertion = how
        self.record.cost["reinserts"] += 1

    def composed(self) -> None:
        """An accepted repair of the finished picture leaves with it."""
        note = "finished picture: composed in pixels"
        self.record.reinsertion = {"rule": "composed", "asked": "composed", "note": note}

    def note(self, text: str) -> None:
        self.record.notes.append(text)

    def control(self, image: Float[Tensor, "3 h w"], heat: Tensor | None = None, why: str = "") -> None:
        """The picture a tournament starts from or, with `why`, the Grad-CAM of that category over it."""
        kind = f"why {why}" if why else "control"
        self.picture(kind, len(self.record.tournaments), image, heat)

    def picture(self, kind: str, index: int, image: Float[Tensor, "3 h w"], heat: Tensor | None = None) -> None:
        """A picture for the report: as it is for operators, else blurred beyond recognition."""
        clear = self.recorder.clear
        shown = to_pil(image) if clear else blurred_thumbnail(image)
        self.recorder.evidence.append(Evidence(self.record.step, kind, index, shown, not clear, heat))
