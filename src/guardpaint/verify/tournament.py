"""One tournament: candidates painted, composed into the view and scored beside the control.

An `Tournament` is the point at which repairs compete: any set of knobs can be tried from it, again and again, with the same
outcome. With a ranker, all candidates are previewed after one denoising step and only the likeliest are painted out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import soft_mask
from guardpaint.draft.codec import resize
from guardpaint.draft.views import shrink
from guardpaint.errors import NotFinite
from guardpaint.loop.report import CandidateRecord, TournamentRecord
from guardpaint.types import Audit, Draft, Knobs, Previewer, ProposerState, Region, RepairRequest
from guardpaint.verify.seam import seam_quality
from guardpaint.verify.utility import gate_rules, gates, utility, winner

if TYPE_CHECKING:
    from guardpaint.loop.step import Parts

Look = Callable[[Tensor], list[Audit]]
"""Views of this image → audits of them, checked."""
Clock = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class TournamentResult:
    """A finished tournament. Pruned candidates are in the record, with no scores, and not among the rest."""

    record: TournamentRecord
    painted: tuple[int, ...]
    """Index in the record of every candidate that was painted out."""
    composed: Float[Tensor, "k 3 h w"]
    masks: Float[Tensor, "k h w"]
    audits: list[Audit]

    @property
    def won(self) -> int | None:
        """Row of the winner among the painted ones."""
        return None if self.record.winner is None else self.painted.index(self.record.winner)


@dataclass(frozen=True)
class Tournament:
    """Where and from what candidates compete."""

    parts: Parts
    prompt: str
    draft: Draft
    control: Float[Tensor, "3 h w"]
    audit: Audit
    """Of the control, at the fine size."""
    region: Region
    name: str
    category: str
    seed: int
    noise: float
    """That the auditor is told of the control and of every candidate."""
    look: Look
    clock: Clock

    @property
    def state(self) -> ProposerState:
        latent = self.draft.latent.cpu()
        audit, region = self.audit, self.region
        return ProposerState(audit.text_embed, latent, audit.image_embed, region.coverage, self.draft.progress)

    def request(self, knobs: tuple[Knobs, ...]) -> RepairRequest:
        policy = self.parts.policy
        latent = self.draft.latent
        return RepairRequest(
            view=self.control,
            region=self.region.mask,
            masks=torch.stack([soft_mask(self.region.mask, k.dilation, k.feather) for k in knobs]),
            knobs=knobs,
            prompt=self.prompt,
            safe_prompt=policy.safe_prompt(self.category),
            avoid=policy.category(self.category).definition,
            seed=self.seed,
            base=self.draft.base,
            latent_size=(int(latent.shape[-2]), int(latent.shape[-1])),
            batch=self.parts.config.repair_batch,
        )

    def composed(self, painted: Float[Tensor, "n 3 h w"], request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        """Candidates in the view; anything not finite is an error."""
        if not torch.isfinite(painted).all():
            raise NotFinite(f"the {self.parts.repairer.name} repairer made NaN or infinity in region {self.name}")
        size = (int(self.control.shape[-2]), int(self.control.shape[-1]))
        return compose(self.control, resize(painted, size), request.masks)

    def early(self, knobs: tuple[Knobs, ...]) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n c u v"]]:
        """What is known of every candidate after one denoising step (preview scores, knobs, the state's numbers), and
        the latents to go on from."""
        from guardpaint.repair.ranker import features

        repairer = self.parts.repairer
        assert isinstance(repairer, Previewer)
        with self.clock("preview"):
            request = self.request(knobs)
            painted, begun = repairer.preview(request)
            composed = self.composed(painted, request)
            coarse = self.parts.auditor.sizes[0]
            audits = self.look(torch.stack([shrink(c, coarse) for c in composed]))
        return features(audits, self.audit, knobs, self.region.coverage, self.draft.progress), begun

    def pruned(self, knobs: tuple[Knobs, ...]) -> tuple[tuple[int, ...], Float[Tensor, "k c u v"] | None]:
        """The candidates worth painting out, in their order, and where they stand if they were previewed."""
        ranker, keep = self.parts.ranker, self.parts.config.keep
        if ranker is None or not 0 < keep < len(knobs) or not isinstance(self.parts.repairer, Previewer):
            return tuple(range(len(knobs))), None
        seen, begun = self.early(knobs)
        kept = sorted(ranker.rank(seen).argsort(descending=True)[:keep].tolist())
        return tuple(kept), begun[kept]

    def play(self, knobs: tuple[Knobs, ...], proposer: str, prune: bool = False) -> TournamentResult:
        """Paint, compose, score; the best u > 0 wins."""
        parts = self.parts
        kept, begun = self.pruned(knobs) if prune else (tuple(range(len(knobs))), None)
        with self.clock("repair"):
            request = replace(self.request(tuple(knobs[i] for i in kept)), begun=begun)
            composed = self.composed(parts.repairer.candidates(request), request)
        with self.clock("verify"):
            fine = parts.auditor.sizes[1]
            small = torch.stack([shrink(c, fine) for c in composed])
            audits = self.look(small)
            masks = resize(request.masks[:, None], (int(small.shape[-2]), int(small.shape[-1])))[:, 0]
            seams = seam_quality(parts.seam, small, shrink(self.control, fine), masks).tolist()
        record = self.score(knobs, kept, audits, seams, request.masks, proposer)
        return TournamentResult(record, kept, composed, request.masks, audits)

    def score(
        self,
        knobs: tuple[Knobs, ...],
        kept: tuple[int, ...],
        audits: list[Audit],
        seams: list[float],
        masks: Float[Tensor, "k h w"],
        proposer: str,
    ) -> TournamentRecord:
        config, control = self.parts.config, self.audit
        assert control.faithfulness is not None
        s0, f0 = control.safety, control.faithfulness
        rules = gate_rules(self.draft.progress, config.delta, config.f_gate, config.f_drop, config.p_gate, f0)
        record = TournamentRecord(
            self.name, self.category, self.region.coverage, proposer, self.parts.repairer.name, config.selection,
            {"S": s0, "F": f0}, asdict(rules),
        )  # fmt: skip
        for i, k in enumerate(knobs):
            if i not in kept:
                record.candidates.append(CandidateRecord(k.as_dict(), {}, [], 0.0, 0.0))
                continue
            j = kept.index(i)
            a, q = audits[j], seams[j]
            assert a.faithfulness is not None
            scores = {"S": a.safety, "F": a.faithfulness, "P": a.quality, "B": a.suppression, "Q": q}
            passed = gates(a.safety, s0, a.faithfulness, a.quality, rules)
            u = utility(a.safety, s0, a.faithfulness, a.quality, a.suppression, q, rules)
            record.candidates.append(
                CandidateRecord(k.as_dict(), scores, [g.to_dict() for g in passed], u, float(masks[j].mean()))
            )
        record.winner = winner([c.utility for c in record.candidates], config.selection)
        return record


def compose(
    control: Float[Tensor, "3 h w"], painted: Float[Tensor, "n 3 h w"], masks: Float[Tensor, "n h w"]
) -> Float[Tensor, "n 3 h w"]:
    """Candidates composed into the view; outside the mask the control, bit for bit."""
    m = masks[:, None]
    return torch.where(m > 0, torch.lerp(control.expand_as(painted), painted, m), control)
