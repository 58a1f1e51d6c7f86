"""What a guard is made of, and one checked pass of its auditor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.contract import check_audit, check_pictures, checked_approval, checked_audits
from guardpaint.audit.tiles import bounded, cut, lowered, merged, tiling, touches, where
from guardpaint.config import GuardConfig
from guardpaint.draft.codec import resize
from guardpaint.policy import Finding, Policy
from guardpaint.repair.ranker import Ranker
from guardpaint.types import (
    SAFE,
    Approval,
    Approver,
    Audit,
    Auditor,
    Proposer,
    Repairer,
    SeamMetric,
    Tile,
    TileAudit,
)
from guardpaint.verify.passes import Passes
from guardpaint.verify.seam import BackboneSeam

Look = Callable[[Tensor], list[Audit]]
"""Views of one image → checked audits of them."""
TILE_BATCH = 16


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
    approver: Approver | None = None
    """Looks at every finished picture; takes no part in choosing."""
    observer: Callable[[Any], None] | None = None
    """Called with every `Tournament` before it is played; if it raises, the image fails closed."""

    @property
    def passes(self) -> Passes:
        """How the steps of several images share these parts."""
        during = self.seam.remembering if isinstance(self.seam, BackboneSeam) else nullcontext
        return Passes(self.repairer, self.audit, during)

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        """One auditor pass. A score that is missing or not a number is an error, never a pass."""
        check_pictures(images)
        audits = checked_audits(self.auditor.audit(images, prompts, noise), self.auditor, prompts)
        return [completed(audit, self.policy.names) for audit in audits]

    def checked(self, audit: Audit, prompt: str | None) -> Audit:
        """An audit that can be relied on, with every category of the policy in it; raises for any other."""
        check_audit(audit, self.auditor, prompt)
        return completed(audit, self.policy.names)

    def approval(
        self, image: Float[Tensor, "3 h w"], prompt: str | None, edited: bool
    ) -> tuple[Approval, Finding | None]:
        """What the approver says of a finished picture, and the finding if it does not pass."""
        assert self.approver is not None
        check_pictures(image)
        approval = checked_approval(self.approver.approve(image, prompt, edited), self.approver, "approver")
        every = {name: approval.probs.get(name, 0.0) for name in self.policy.names}
        finding = self.policy.finding_of(1 - every[SAFE], every)
        return approval, None if finding is None else replace(finding, reason=f"{approval.by}: {finding.reason}")

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Categories of the policy that neither auditor nor approver can tell."""
        known = {*self.auditor.categories, *(() if self.approver is None else self.approver.categories)}
        return tuple(name for name in self.policy.names if name not in known)

    def finding(self, audit: Audit, progress: float) -> Finding | None:
        """The finding of the policy, with the thresholds calibrated for this progress; None if the audit is benign.

        If the picture was audited in tiles, every view must be benign; the worst one is named first.
        """
        calibration = self.config.calibration
        thresholds = None if calibration is None else calibration.at(progress).thresholds
        if not audit.tiles:
            return self.policy.finding(audit, thresholds)
        for view in sorted(audit.tiles, key=lambda v: v.audit.safety):
            found = self.policy.finding(view.audit, thresholds)
            if found is not None:
                return found if view is audit.tiles[0] else replace(found, reason=f"{found.reason}, {where(view.tile)}")
        return None

    def tiles_of(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[Tile, ...]]:
        """The tiles of a picture of this size and the size of the picture that they are cut from.

        A picture above the calibrated sizes is shrunk to the largest one, and one with too many tiles still further.
        """
        scope = self.config.scope
        if scope is None:
            return size, ()
        scale = min(1.0, scope.pixels[1] / min(size))
        shown = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
        return bounded(shown, scope.side)

    def coarser(self, size: tuple[int, int]) -> str:
        """That the tiles of a picture of this size are cut from a smaller one, in words; empty if they are not."""
        scope = self.config.scope
        shown = self.tiles_of(size)[0]
        if scope is None or shown == size:
            return ""
        count = len(tiling(size, scope.side))
        why = f"they are cut from it at {shown[1]}x{shown[0]}, so small harm may not be seen"
        return f"pictures of {size[1]}x{size[0]} would be audited in {count} tiles; {why}"

    def uncalibrated(self, size: tuple[int, int], guidance: float | None = None, steps: int | None = None) -> list[str]:
        """What of a call lies outside of what the guard was calibrated for, in words; None is not checked."""
        scope = self.config.scope
        outside = [] if scope is None else scope.outside(size, guidance, steps)
        return [f"outside of what the guard was calibrated for: {what}" for what in outside]

    def unseen(self, size: tuple[int, int]) -> list[str]:
        """Why small harm in pictures of this size may not be seen, in words."""
        if self.config.scope is not None:
            return [note] if (note := self.coarser(size)) else []
        if min(size) <= self.fine_size:
            return []
        seen = f"pictures of {size[1]}x{size[0]} are only seen whole, {self.fine_size} pixels high or wide"
        return [f"{seen}: the guard has no scope, so small harm may not be seen (guardpaint calibrate-scope)"]

    def with_tiles(
        self, whole: Audit, picture: Callable[[], Tensor], size: tuple[int, int], look: Look, edited: bool = False
    ) -> Audit:
        """Add the tiles of a picture to the audit of the whole, if the picture is larger than the auditor learned.

        `picture` decodes it at its own size; it is called only if there are tiles. The tiles of an edited picture are
        not lowered: harm was there, and false alarms matter where it was not.
        """
        shown, tiles = self.tiles_of(size)
        if not tiles or self.config.scope is None:
            return whole
        source = resize(picture()[None], shown)[0]
        offset = 0.0 if edited else self.config.scope.tile_offset
        return merged(whole, self.audit_tiles(source, tiles, whole.pixels, look, offset), shown)

    def retouched(
        self,
        whole: Audit,
        control: Audit,
        picture: Float[Tensor, "3 h w"],
        mask: Float[Tensor, "h w"],
        look: Look,
        floor: float = -1.0,
    ) -> Audit:
        """The audit of a picture that differs from an audited control inside a mask only.

        Only the tiles that the mask touches are audited again, those first that were worst. It stops as soon as the
        picture is known to be no safer than `floor`; its S is then an upper bound.
        """
        if not control.tiles:
            return whole
        shown, tiles = self.tiles_of((int(picture.shape[-2]), int(picture.shape[-1])))
        new = [t for t in tiles if touches(t, mask, shown)]
        before = {v.tile: v.audit.safety for v in control.tiles[1:]}
        new.sort(key=lambda tile: before[tile])
        source = resize(picture[None], shown)[0]
        views: list[TileAudit] = []
        for some in (new[:2], new[2:]):
            if min([whole.safety, *(v.audit.safety for v in views)]) > floor:
                views += self.audit_tiles(source, some, whole.pixels, look, control.tiles[1].offset)
        kept = [v for v in control.tiles[1:] if v.tile not in new]
        return merged(whole, [*views, *kept], shown)

    def audit_tiles(
        self, source: Float[Tensor, "3 h w"], tiles: Sequence[Tile], pixels: int, look: Look, offset: float
    ) -> list[TileAudit]:
        """Audits of tiles, each shown at `pixels` and lowered by `offset` logits, in batches."""
        found: list[TileAudit] = []
        for start in range(0, len(tiles), TILE_BATCH):
            some = tiles[start : start + TILE_BATCH]
            audits = look(torch.stack([cut(source, t, pixels) for t in some]))
            found += [TileAudit(t, lowered(a, offset), offset) for t, a in zip(some, audits, strict=True)]
        return found

    def first_size(self, progress: float) -> int:
        """Size in pixels of the first audit of a step."""
        coarse, fine = self.auditor.sizes
        if self.config.resolution == "paper":
            return fine if progress >= 0.65 else coarse
        return fine if self.config.resolution == "fine" else coarse

    @property
    def glance_size(self) -> int:
        """Size in pixels of a glance, such as 128 where the coarse audit has 224."""
        return glance_size(self.auditor.sizes[0])

    @property
    def look_sizes(self) -> tuple[int, ...]:
        """Sizes at which unfinished pictures are looked at."""
        return (*self.auditor.sizes, *(() if self.config.glance_from is None else (self.glance_size,)))

    def glance_trigger(self, progress: float) -> float:
        """The adv_prob from which on a glance schedules an audit: the calibrated one, or the trigger minus `band`."""
        calibration = self.config.calibration
        own = None if calibration is None else calibration.at(progress).glance
        return max(0.0, self.policy.trigger - self.config.band) if own is None else own

    @property
    def fine_size(self) -> int:
        """Size in pixels of the audit that confirms a trigger and localises it."""
        return self.auditor.sizes[1]


def glance_size(coarse: int) -> int:
    """Size in pixels of a glance, from that of the coarse audit."""
    return max(8, round(coarse * 4 / 7))


def completed(audit: Audit, categories: tuple[str, ...]) -> Audit:
    """The audit with probability 0 and an empty map for every category that the auditor cannot tell."""
    unknown = [c for c in categories if c not in audit.probs]
    if not unknown:
        return audit
    empty = torch.zeros_like(audit.adv_map)
    return replace(
        audit,
        probs={c: audit.probs.get(c, 0.0) for c in categories},
        class_maps={c: audit.class_maps.get(c, empty) for c in categories},
    )
