"""What a protocol run will draw, and roughly how long that takes. Opens every base, so that a bad path fails early."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from guardpaint.evaluate.evaluated_base import EvaluatedBase, drawn_with
from guardpaint.evaluate.harness import Cast
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.evaluate.run import Case

COST = {"sld": 1.6, "post_hoc_regenerate": 1.5, "ours": 2.5, "paper": 2.5}
"""Time of a picture as a multiple of the undefended one, on attack prompts; for others it is hardly more than one."""
MEASURED = 3
"""Fewest earlier pictures whose mean time goes before an estimate."""


@dataclass(frozen=True)
class Line:
    """The plan of one base and defence."""

    base: str
    defence: str
    pictures: int
    """Prompts of all suites."""
    drawn: int
    """Pictures of them that the run's folder has already."""
    seconds: float
    """Seconds that one picture takes, as measured or estimated."""
    reason: str = ""
    """Why the defence cannot run on the base."""
    drawn_with: str = ""
    """Steps, guidance, size and sampler of the base."""

    @property
    def hours(self) -> float:
        return 0.0 if self.reason else (self.pictures - self.drawn) * self.seconds / 3600


def planned(
    cast: Cast, defences: Sequence[str], cases: Sequence[Sequence[Case]], rows: Sequence[EvaluationRow]
) -> Iterator[Line]:
    """The plan of every base and defence. A base that has no pictures yet draws one, to be timed."""
    prompts = {(c.suite, c.prompt, c.seed) for some in cases for c in some}
    first = next(c for some in cases for c in some)
    found: dict[tuple[str, str], list[EvaluationRow]] = defaultdict(list)
    for r in rows:
        if (r.suite, r.prompt, r.seed) in prompts:
            found[r.base, r.defence].append(r)
    for base in cast.bases:
        opened = cast.base(base)
        plain = mean_seconds(found[base, "undefended"]) or timed(opened, first)
        for name in defences:
            defence = cast.defence(name)[0]
            own = found[base, defence.name]
            seconds = mean_seconds(own) or plain * COST.get(defence.name, 1.0)
            drawn = len({(r.suite, r.prompt, r.seed) for r in own})
            yield Line(base, defence.name, len(prompts), drawn, seconds, defence.applies(opened), drawn_with(opened))


def mean_seconds(rows: Sequence[EvaluationRow]) -> float:
    """Mean time of these pictures, or 0 if there are too few."""
    return sum(r.seconds for r in rows) / len(rows) if len(rows) >= MEASURED else 0.0


def timed(base: EvaluatedBase, case: Case) -> float:
    """Seconds that the base takes for one picture, undefended."""
    began = time.perf_counter()
    base.draw([case.prompt], [case.seed])
    return time.perf_counter() - began


def described(lines: Sequence[Line], processes: int = 1) -> Iterator[str]:
    """The plan as text: what each base draws with, what is left to draw, and hours, for each base and in all."""
    for base in dict.fromkeys(line.base for line in lines):
        own = [line for line in lines if line.base == base]
        left = sum(line.pictures - line.drawn for line in own if not line.reason)
        done = sum(line.drawn for line in own)
        hours = sum(line.hours for line in own) / processes
        yield f"{base}: {own[0].drawn_with}; {left} pictures to draw, {done} there already, about {spoken(hours)}"
        yield from (f"{base}: no {line.defence}, {line.reason}" for line in own if line.reason)
    left = sum(line.pictures - line.drawn for line in lines if not line.reason)
    hours = sum(line.hours for line in lines) / processes
    yield f"in all {left} pictures to draw, about {spoken(hours)} (a rough estimate; judges are not in it)"


def spoken(hours: float) -> str:
    """Hours as text, minutes if there are few."""
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
