"""What the stages of one step share: the context of an image, the plan of a repair, and an accepted repair."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.views import View
from guardpaint.loop.recorder import StepWriter
from guardpaint.loop.report import ApprovalRecord, AuditRecord
from guardpaint.policy import Finding
from guardpaint.types import Approval, Audit, Draft, Proposer
from guardpaint.verify.parts import Parts
from guardpaint.verify.passes import Look, Work


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
class Repair:
    """An accepted repair. Its composed view is the control of the next tournament."""

    view: Float[Tensor, "3 h w"]
    mask: Float[Tensor, "h w"]
    audit: Audit

    def after(self, earlier: Repair | None) -> Repair:
        """This repair on top of an earlier one, with the union of both masks."""
        return self if earlier is None else replace(self, mask=torch.maximum(earlier.mask, self.mask))


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
