"""The tournaments of one flagged step: its regions in turn, or those that are apart together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from guardpaint.audit.regions import soft_mask, union
from guardpaint.draft.codec import resize
from guardpaint.loop.context import Repair, RepairPlan, StepContext, as_refused
from guardpaint.store.seeds import derive
from guardpaint.types import Knobs, Region
from guardpaint.verify.passes import Paint, Work
from guardpaint.verify.tournament import Tournament, TournamentResult, compose, wave_parts


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
