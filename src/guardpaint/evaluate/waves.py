"""Calibrate waves: from which S on a candidate of the first wave is as safe as the winner of the whole tournament.

guardpaint calibrate-waves DIR --first 1 --count 200

Tournaments are caught from attacked generations and played in full. For each the judge says what the winner of all
candidates shows, and what the winner of the first wave shows. The limit is the lowest one with which ending after the
first wave raises the share of unsafe winners by no more than the tolerance, at the upper end of its interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guardpaint.data.judges.opinion import Judge
from guardpaint.errors import BadInput
from guardpaint.evaluate.statistics import paired_interval, wilson
from guardpaint.guard import MANIFEST, GuardPaint
from guardpaint.parts.folder import own_folder
from guardpaint.store.checkpoint import read_json, write_json
from guardpaint.store.images import to_pil
from guardpaint.store.progress import track
from guardpaint.store.results import metric, write_results
from guardpaint.testbed import Testbed, open_testbed
from guardpaint.train.rollouts import catch, rollout_prompts, tournament_of
from guardpaint.types import SAFE
from guardpaint.verify.parts import Parts
from guardpaint.verify.tournament import TournamentResult

LIMITS = tuple(k / 100 for k in range(50, 100))
"""Limits of S that are tried."""


@dataclass(frozen=True)
class Played:
    """One tournament of which every candidate was painted, with the judge's word on the two choices."""

    base: str
    seed: int
    safety: float | None
    """S of the first wave's winner; None if it has none."""
    spare: float
    """By how much that winner is above its P and F gates."""
    first_unsafe: bool
    """Whether the judge calls that winner unsafe."""
    unsafe: bool
    """Whether it calls the winner of all unsafe; without a winner, the control."""

    def ends(self, limit: float, margin: float) -> bool:
        """Whether the tournament would end after its first wave."""
        return self.safety is not None and self.safety >= limit and self.spare >= margin

    def harm(self, limit: float, margin: float) -> int:
        """What ending early costs: 1 if only the early choice is unsafe, −1 if only the late one, else 0."""
        return int(self.first_unsafe) - int(self.unsafe) if self.ends(limit, margin) else 0


def play(result: TournamentResult, first: int, judge: Judge, control: Any) -> dict[str, Any]:
    """The fields of `Played` that a finished tournament gives."""
    candidates = result.record.candidates

    def unsafe(index: int | None) -> bool:
        view = control if index is None else result.composed[result.painted.index(index)]
        return judge.verdict(to_pil(view), {})[0] != SAFE

    early = max(range(min(first, len(candidates))), key=lambda i: candidates[i].utility)
    if candidates[early].utility <= 0:
        return {"safety": None, "spare": 0.0, "first_unsafe": False, "unsafe": unsafe(result.record.winner)}
    gates = [g["value"] - g["need"] for g in candidates[early].gates if g["name"] != "S"]
    return {
        "safety": candidates[early].scores["S"],
        "spare": min(gates, default=1.0),
        "first_unsafe": unsafe(early),
        "unsafe": unsafe(result.record.winner),
    }


def played(guard: GuardPaint, testbed: Testbed, bases: Sequence[str], first: int, count: int) -> Iterator[Played]:
    """`count` tournaments, the bases taking turns in equal shares."""
    judge, parts = testbed.judge(guard.policy), guard.parts
    for base in bases:
        prompts = rollout_prompts(testbed, "test", 3 * count)
        left = -(-count // len(bases))
        for state in track(catch(guard, testbed.base(base), prompts), f"{base} tournaments", len(prompts)):
            if state is not None:
                yield Played(base, state.seed, **play(full(state, parts), first, judge, state.control))
                left -= 1
            if not left:
                break


def full(state: Any, parts: Parts) -> TournamentResult:
    """A caught tournament with all of its candidates."""
    tournament = tournament_of(state, parts)
    knobs = parts.proposer.propose(tournament.state, parts.config.candidates, tournament.seed)
    return tournament.play(knobs, parts.proposer.name)


def added(rows: Sequence[Played], limit: float, margin: float = 0.0) -> tuple[float, float]:
    """Interval (95 %) of what ending early adds to the share of unsafe winners."""
    return paired_interval([row.harm(limit, margin) for row in rows], [row.seed for row in rows])


def lowest_limit(rows: Sequence[Played], tolerance: float, margin: float = 0.0) -> float:
    """The lowest limit of S that is safe for every limit above it too; raises BadInput if there is none.

    It is never below the lowest S with which a tournament was seen to end.
    """
    found: float | None = None
    seen = min((row.safety for row in rows if row.ends(0.0, margin) and row.safety is not None), default=1.0)
    for limit in reversed(LIMITS):
        if added(rows, limit, margin)[1] > tolerance or (found is not None and found <= seen):
            break
        found = limit
    if found is None:
        raise BadInput(
            f"with {len(rows)} tournaments, ending early cannot be shown to cost at most {tolerance:g} at any S up to "
            f"{LIMITS[-1]:g}: play more with --count, allow more with --tolerance, or leave waves off"
        )
    return found


def rates(rows: Sequence[Played], limit: float | None, tolerance: float) -> dict[str, Any]:
    """The metrics of a calibration; without a limit, those of ending at the highest one that was tried."""
    tried = LIMITS[-1] if limit is None else limit
    ends = sum(row.ends(tried, 0.0) for row in rows)
    cost, n = [row.harm(tried, 0.0) for row in rows], len(rows)
    return {
        "limit": metric(limit, n),
        "ends_after_first": metric(ends / n, n, ci=wilson(ends, n)),
        "harm_added": metric(
            sum(cost) / n, n, ci=added(rows, tried), goal=f"<={tolerance:g}", sure=True,
            note="on the tournaments that chose the limit",
        ),
        "unsafe_winners": metric(sum(row.unsafe for row in rows) / n, n),
    }  # fmt: skip


def run(
    guard_dir: Path, out: Path, *, first: int, count: int, tolerance: float, bases: Sequence[str], testbed: str | None
) -> float:
    """Find the limit, write rows and metrics to `out` and waves with the limit into the guard; returns the limit."""
    own_folder(guard_dir)
    world, guard = open_testbed(testbed), GuardPaint.from_pretrained(guard_dir, waves="off")
    if not 0 < first < guard.config.candidates:
        raise BadInput(f"--first {first}: a first wave has at least 1 of {guard.config.candidates} candidates, not all")
    rows = list(played(guard, world, list(bases) or list(world.bases()), first, count))
    if not rows:
        raise BadInput("no tournament was caught: none of the testbed's harmful prompts triggers the guard")
    try:
        limit: float | None = lowest_limit(rows, tolerance)
        failure = None
    except BadInput as error:  # what was measured is kept
        limit, failure = None, error
    write_results(out, rates(rows, limit, tolerance), [vars(row) for row in rows], seed=0)
    if limit is None:
        assert failure is not None
        raise failure
    manifest = read_json(guard_dir / MANIFEST)
    manifest["config"] = {**manifest["config"], "waves": str(first), "wave_safety": limit}
    write_json(guard_dir / MANIFEST, manifest)
    return limit
