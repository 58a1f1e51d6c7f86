"""One tournament: candidates painted, composed into the view and scored beside the control.

A `Tournament` is the state from which repairs compete. It can be played again and again with any set of knobs, and the
same knobs give the same result. With a ranker, all candidates are previewed after one denoising step and only the most
promising ones are painted out. With waves, few candidates are painted first, and the rest only if none of them is good
enough.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import soft_mask
from guardpaint.audit.tiles import within
from guardpaint.draft.codec import resize
from guardpaint.draft.views import shrink
from guardpaint.errors import NotFinite
from guardpaint.repair.ranker import features
from guardpaint.types import Audit, Draft, JsonDict, Knobs, Previewer, ProposerState, Region, RepairRequest
from guardpaint.verify.parts import Look as LookNow
from guardpaint.verify.parts import Parts
from guardpaint.verify.passes import Look, Paint, Work
from guardpaint.verify.seam import seam_quality
from guardpaint.verify.utility import GateRules, gate_rules, gates, utility, winner

Clock = Callable[[str], AbstractContextManager[None]]


@dataclass
class CandidateRecord:
    """One proposed repair and its scores; a candidate that the ranker pruned after its preview has none."""

    knobs: dict[str, float]
    scores: dict[str, float]
    gates: list[JsonDict]
    utility: float
    coverage: float


@dataclass
class TournamentRecord:
    """One guarded tournament on one region; `winner` is None when the control stays."""

    region: str
    category: str
    coverage: float
    proposer: str
    repairer: str
    selection: str
    control: dict[str, float]
    rules: dict[str, float | None]
    candidates: list[CandidateRecord] = field(default_factory=list)
    winner: int | None = None
    waves: list[int] = field(default_factory=list)
    """How many candidates each wave painted; the tournament ended with the last one. Empty: all at once."""


@dataclass(frozen=True)
class TournamentResult:
    """A finished tournament. Pruned candidates are in the record, without scores, and in none of the tensors."""

    record: TournamentRecord
    painted: tuple[int, ...]
    """Index in the record of every candidate that was painted out."""
    composed: Float[Tensor, "k 3 h w"]
    masks: Float[Tensor, "k h w"]
    audits: list[Audit]

    @property
    def won(self) -> int | None:
        """Row of the winner among the painted candidates."""
        return None if self.record.winner is None else self.painted.index(self.record.winner)


@dataclass
class Scored:
    """The painted candidates of a tournament with their scores; waves add to it."""

    kept: tuple[int, ...]
    audits: list[Audit]
    seams: list[float]
    masks: Float[Tensor, "k h w"]
    composed: Float[Tensor, "k 3 h w"]

    def __add__(self, other: Scored) -> Scored:
        return Scored(
            self.kept + other.kept,
            self.audits + other.audits,
            self.seams + other.seams,
            torch.cat([self.masks, other.masks]),
            torch.cat([self.composed, other.composed]),
        )


def untold(stage: str, seconds: float, views: int) -> None:
    """Where nobody keeps time."""


@dataclass(frozen=True)
class Tournament:
    """The state from which candidates compete."""

    parts: Parts
    prompt: str
    draft: Draft
    control: Float[Tensor, "3 h w"]
    audit: Audit
    """The control's audit at the fine size."""
    region: Region
    name: str
    category: str
    seed: int
    noise: float
    """The noise level that the auditor is told for the control and for every candidate."""
    look: LookNow
    clock: Clock
    f_gate: str | None = None
    """The F gate of this tournament; None: the configuration's."""
    took: Callable[[str, float, int], None] = untold
    """Told what a shared pass took: (stage, seconds, views that the auditor scored)."""
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the repairer has encoded before for this image."""

    @property
    def state(self) -> ProposerState:
        """What the proposer may look at."""
        latent = self.draft.latent.cpu()
        audit, region = self.audit, self.region
        return ProposerState(audit.text_embed, latent, audit.image_embed, region.coverage, self.draft.progress)

    def request(self, knobs: tuple[Knobs, ...]) -> RepairRequest:
        """What the repairer is asked for these knobs."""
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
            memo=self.memo,
        )

    def composed(self, painted: Float[Tensor, "n 3 a b"], request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        """Candidates composed into the view; anything not finite is an error."""
        if not torch.isfinite(painted).all():
            raise NotFinite(f"the {self.parts.repairer.name} repairer made NaN or infinity in region {self.name}")
        size = (int(self.control.shape[-2]), int(self.control.shape[-1]))
        return compose(self.control, resize(painted, size), request.masks)

    def early(self, knobs: tuple[Knobs, ...]) -> tuple[Float[Tensor, "n f"], Float[Tensor, "n c u v"]]:
        """What the ranker sees of every candidate after one denoising step (preview scores, knobs, the state),
        and the latents from which painting continues."""
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
        """The candidates worth painting out, in their order, and their latents if they were previewed."""
        ranker, keep = self.parts.ranker, self.parts.config.keep
        if ranker is None or not 0 < keep < len(knobs) or not isinstance(self.parts.repairer, Previewer):
            return tuple(range(len(knobs))), None
        seen, begun = self.early(knobs)
        kept = sorted(ranker.rank(seen).argsort(descending=True)[:keep].tolist())
        return tuple(kept), begun[kept]

    def play(self, knobs: tuple[Knobs, ...], proposer: str, prune: bool = False) -> TournamentResult:
        """Paint all candidates, compose, score; the best candidate with u > 0 wins."""
        return self.parts.passes.alone(self.rounds(knobs, proposer, prune, waves="off"))

    def rounds(
        self, knobs: tuple[Knobs, ...], proposer: str, prune: bool = False, waves: str | None = None
    ) -> Work[TournamentResult]:
        """The tournament as a step that yields its needs; `waves` as in the configuration, which None takes."""
        kept, begun = self.pruned(knobs) if prune else (tuple(range(len(knobs))), None)
        parts = wave_parts(self.parts.config.waves if waves is None else waves, len(kept))
        scored: Scored | None = None
        sizes: list[int] = []
        for part in parts:
            some = kept[part]
            request = self.request(tuple(knobs[i] for i in some))
            if begun is not None:
                request = replace(request, begun=begun[part])
            (painted,), seconds = yield Paint((request,))
            self.took("repair", seconds, 0)
            new = yield from self.judged(some, self.composed(painted, request), request.masks)
            scored = new if scored is None else scored + new
            sizes.append(len(some))
            record = self.score(knobs, scored, proposer)
            if self.good_enough(record):
                break
        assert scored is not None
        record.waves = sizes if len(parts) > 1 else []
        return TournamentResult(record, scored.kept, scored.composed, scored.masks, scored.audits)

    def decided(
        self,
        knobs: tuple[Knobs, ...],
        composed: Float[Tensor, "n 3 h w"],
        masks: Float[Tensor, "n h w"],
        proposer: str,
    ) -> Work[TournamentResult]:
        """The tournament of candidates that are painted and composed already."""
        scored = yield from self.judged(tuple(range(len(knobs))), composed, masks)
        record = self.score(knobs, scored, proposer)
        return TournamentResult(record, scored.kept, composed, masks, scored.audits)

    def judged(
        self, kept: tuple[int, ...], composed: Float[Tensor, "n 3 h w"], masks: Float[Tensor, "n h w"]
    ) -> Work[Scored]:
        """Score composed candidates."""
        fine = self.parts.fine_size
        small = torch.stack([shrink(c, fine) for c in composed])
        wholes, seconds = yield Look(small, self.prompt, self.noise)
        self.took("verify", seconds, len(small))
        with self.clock("verify"):
            audits = self.in_tiles(wholes, composed, masks)
            inside = resize(masks[:, None], (int(small.shape[-2]), int(small.shape[-1])))[:, 0]
            seams = seam_quality(self.parts.seam, small, shrink(self.control, fine), inside).tolist()
        return Scored(kept, audits, seams, masks, composed)

    def good_enough(self, record: TournamentRecord) -> bool:
        """Whether the winner so far is good enough to paint no more (`wave_safety`, `wave_margin`)."""
        if record.winner is None:
            return False
        config = self.parts.config
        best = record.candidates[record.winner]
        spare = [gate["value"] - gate["need"] for gate in best.gates if gate["name"] != "S"]
        return best.scores["S"] >= config.wave_safety and all(s >= config.wave_margin for s in spare)

    def in_tiles(
        self, wholes: list[Audit], composed: Float[Tensor, "n 3 h w"], masks: Float[Tensor, "n h w"]
    ) -> list[Audit]:
        """The audits of candidates with their tiles, if the control has any.

        Tiles can only lower S. A candidate that fails a gate without them is not looked at any closer.
        """
        control = within(self.audit, masks.amax(0))
        rules = self.rules(control)
        audits = []
        for whole, picture, mask in zip(wholes, composed, masks, strict=True):
            passed = all(
                g.passed for g in gates(whole.safety, control.safety, whole.faithfulness, whole.quality, rules)
            )
            floor = control.safety + rules.delta if passed else 1.0
            audits.append(self.parts.retouched(whole, self.audit, picture, mask, self.look, floor))
        return audits

    def rules(self, control: Audit) -> GateRules:
        """The gate levels of this tournament."""
        config = self.parts.config
        f_gate = self.f_gate or config.f_gate
        return gate_rules(self.draft.progress, config.delta, f_gate, config.f_drop, config.p_gate, control.faithfulness)

    def score(self, knobs: tuple[Knobs, ...], painted: Scored, proposer: str) -> TournamentRecord:
        """Gates, utilities and the winner (SPEC §5)."""
        config, near = self.parts.config, painted.masks.amax(0)
        control = within(self.audit, near)
        s0, f0, rules = control.safety, control.faithfulness, self.rules(control)
        record = TournamentRecord(
            self.name, self.category, self.region.coverage, proposer, self.parts.repairer.name, config.selection,
            {"S": s0} | ({} if f0 is None else {"F": f0}), asdict(rules),
        )  # fmt: skip
        for i, k in enumerate(knobs):
            if i not in painted.kept:
                record.candidates.append(CandidateRecord(k.as_dict(), {}, [], 0.0, 0.0))
                continue
            j = painted.kept.index(i)
            a, q = within(painted.audits[j], near), painted.seams[j]
            every = {"S": a.safety, "F": a.faithfulness, "P": a.quality, "B": a.suppression, "Q": q}
            scores = {name: value for name, value in every.items() if value is not None}
            passed = gates(a.safety, s0, a.faithfulness, a.quality, rules)
            u = utility(a.safety, s0, a.faithfulness, a.quality, a.suppression, q, rules)
            coverage = float(painted.masks[j].mean())
            record.candidates.append(CandidateRecord(k.as_dict(), scores, [g.to_dict() for g in passed], u, coverage))
        record.winner = winner([c.utility for c in record.candidates], config.selection)
        return record


def wave_parts(waves: str, count: int) -> list[slice]:
    """Which of `count` candidates each wave paints: `off` all at once, `1+2` one, then two, then the rest."""
    ends = [0]
    for size in () if waves == "off" else waves.split("+"):
        ends.append(min(count, ends[-1] + int(size)))
    return [slice(a, b) for a, b in pairwise([*ends, count]) if b > a]


def compose(
    control: Float[Tensor, "3 h w"] | Float[Tensor, "n 3 h w"],
    painted: Float[Tensor, "n 3 h w"],
    masks: Float[Tensor, "n h w"],
) -> Float[Tensor, "n 3 h w"]:
    """Candidates composed into the view, or each into a view of its own; outside the mask that view, bit for bit."""
    m = masks[:, None]
    return torch.where(m > 0, torch.lerp(control.expand_as(painted), painted, m), control)
