"""The paper's table of the guarded tournament policy (GTP), end to end: with the proposer and without it.

guardpaint eval gtp --guard DIR --base mini-sd --count 10

Whole guarded generations from harmful prompts, with 3, 5 and 7 candidates per tournament (the paper's correction budget
c). "Without" draws the same number of candidates with uniformly random knobs. Acc. is the mean number of accepted
tournaments per prompt, Sug. that of all tournaments, and the time is that of the whole generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guardpaint.bases import Base
from guardpaint.data.judges import Judge
from guardpaint.errors import BadInput
from guardpaint.evaluate.defences.guarded import Guarded
from guardpaint.evaluate.proposers import ratio
from guardpaint.evaluate.run import Case, judged
from guardpaint.evaluate.statistics import mean, share
from guardpaint.guard import GuardPaint
from guardpaint.repair.knobs import UniformProposer
from guardpaint.repair.proposer import TournamentProposer
from guardpaint.store.checkpoint import write_atomic
from guardpaint.store.progress import track
from guardpaint.store.results import REVISION, metric, read_rows, write_results
from guardpaint.testbed import Prompt
from guardpaint.train.rollouts import maker

Row = dict[str, Any]
BUDGETS = (3, 5, 7)
WITH, WITHOUT = "gtp", "no_gtp"
TITLES = {WITH: "GTP", WITHOUT: "No GTP"}
COLUMNS = {"accepted": "Acc.", "suggested": "Sug.", "acceptance": "% Acc.", "seconds": "Time (s)"}
BETTER = {"acceptance": max, "seconds": min}
"""Columns whose better value of the two configurations is bold, as in the paper."""


@dataclass(frozen=True)
class GtpOptions:
    """What is measured, and where to."""

    guard: GuardPaint
    bases: Mapping[str, Base]
    prompts: Sequence[Prompt]
    judge: Judge
    path: Path
    budgets: Sequence[int] = BUDGETS

    def __post_init__(self) -> None:
        if not isinstance(self.guard.parts.proposer, TournamentProposer):
            raise BadInput(
                f"the guard's proposer is {self.guard.parts.proposer.name!r}; the table compares a learned one with "
                "none: name it with --learned"
            )
        if not self.prompts:
            raise BadInput("no prompts to generate from")


def configuration(guard: GuardPaint, name: str, budget: int) -> GuardPaint:
    """The guard with this many candidates, with its own proposer or with random knobs."""
    other = guard.configured(candidates=budget)
    if name == WITHOUT:
        other.parts = replace(other.parts, proposer=UniformProposer())
    return other


def measure(base: Base, guard: GuardPaint, prompt: Prompt, judge: Judge) -> Row:
    """One guarded generation: tournaments, accepted ones, seconds, and whether the judge calls the picture safe."""
    outcome = Guarded(guard).generate(base, [prompt.text], [prompt.seed])[0]
    case = Case("gtp", prompt.id, prompt.text, prompt.seed)
    return {
        "accepted": outcome.detail["accepted"],
        "suggested": outcome.detail["tournaments"],
        "triggered": int(outcome.detail["triggered"]),
        "seconds": round(outcome.seconds, 4),
        "threads": torch.get_num_threads(),
        "status": str(outcome.status),
        "unsafe": int(judged(judge, outcome.image, case).unsafe),
        "error": outcome.detail["error"],
    }


def run(options: GtpOptions) -> Row:
    """Measure what has no row yet, write results and the table, and return the metrics.

    Rows of the same guard on bases that are not measured now are kept. All configurations and budgets take turns on
    each prompt, so that a busy machine slows all of them alike.
    """
    wanted = list(product(options.budgets, (WITH, WITHOUT)))
    guards = {cell: configuration(options.guard, cell[1], cell[0]) for cell in wanted}
    before = read_rows(options.path)
    known = {(r["base"], r["maker"], r["prompt"], str(r["seed"])): r for r in before}
    own = maker(options.guard, options.guard.parts.proposer, 0, options.judge.identity)
    rows: list[Row] = [r for r in before if r["base"] not in options.bases and r["guard"] == own]
    for name, base in options.bases.items():
        weights = base.digest()
        makers = {
            cell: maker(guard, guard.parts.proposer, cell[0], weights, options.judge.identity)
            for cell, guard in guards.items()
        }
        warmed = False
        for prompt in track(options.prompts, f"{name} prompts"):
            for cell in wanted:
                row = known.get((name, makers[cell], prompt.text, str(prompt.seed)))
                if row is None:
                    if not warmed:  # the first call of a process pays for what the others find ready
                        measure(base, guards[cell], prompt, options.judge)
                        warmed = True
                    budget, config = cell
                    row = {"base": name, "config": config, "c": budget, "prompt": prompt.text, "seed": prompt.seed}
                    row |= {"kind": prompt.kind, **measure(base, guards[cell], prompt, options.judge)}
                    row |= {"guard": own, "maker": makers[cell], "git": REVISION}
                rows.append(row)
            write_results(options.path, metrics(rows), rows, seed=0)
    found = metrics(rows)
    write_results(options.path, found, rows, seed=0)
    write_atomic(options.path.with_suffix(".md"), table(found).encode())
    return found


def metrics(rows: Sequence[Row]) -> Row:
    """Every number of the table, and the difference that the proposer makes, from rows alone."""
    out: Row = {}
    for base, c in dict.fromkeys((r["base"], int(r["c"])) for r in rows):
        of: dict[str, dict[str, Row]] = {}
        for name in (WITH, WITHOUT):
            own = [r for r in rows if (r["base"], int(r["c"]), r["config"]) == (base, c, name)]
            of[name] = {str(r["seed"]): r for r in own}
            if not own:
                continue
            number = lambda column: [float(r[column]) for r in own]  # noqa: B023, E731
            key = f"{base}.{name}.c{c}"
            out[f"{key}.accepted"] = mean(number("accepted"), None)
            out[f"{key}.suggested"] = mean(number("suggested"), None)
            out[f"{key}.acceptance"] = ratio(number("accepted"), number("suggested"))
            out[f"{key}.seconds"] = mean(number("seconds"), None)
            out[f"{key}.unsafe"] = share([bool(int(r["unsafe"])) for r in own], None)
        both = [s for s in of[WITH] if s in of[WITHOUT]]
        if both:
            out |= gain(f"{base}.gain.c{c}", [of[WITH][s] for s in both], [of[WITHOUT][s] for s in both])
    return out


def gain(key: str, ours: Sequence[Row], theirs: Sequence[Row]) -> Row:
    """What the proposer adds to the acceptance and takes from the time, over the same prompts; intervals by prompt."""
    picks = np.random.default_rng(0).integers(len(ours), size=(2000, len(ours)))
    picks = np.vstack([np.arange(len(ours)), picks])  # the first line is the data themselves
    total = {
        (who, name): np.array([float(r[name]) for r in rows])[picks].sum(1)
        for who, rows in (("ours", ours), ("theirs", theirs))
        for name in ("accepted", "suggested", "seconds")
    }
    out: Row = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        values = {
            "acceptance": total["ours", "accepted"] / total["ours", "suggested"]
            - total["theirs", "accepted"] / total["theirs", "suggested"],
            "seconds_ratio": total["ours", "seconds"] / total["theirs", "seconds"],
        }
    for (name, drawn), goal in zip(values.items(), (">0", "<1"), strict=True):
        if not np.isfinite(drawn[0]):
            out[f"{key}.{name}"] = metric(None, len(ours), goal=goal)
            continue
        low, high = np.nanpercentile(drawn[1:], [2.5, 97.5])
        out[f"{key}.{name}"] = metric(float(drawn[0]), len(ours), goal=goal, ci=(float(low), float(high)), sure=True)
    return out


def table(found: Mapping[str, Row]) -> str:
    """The paper's table as Markdown; the better acceptance and time of each pair are bold."""
    keys = [k.split(".") for k in found if k.endswith(".seconds")]
    bases = list(dict.fromkeys(".".join(k[:-3]) for k in keys))
    budgets = sorted({int(k[-2].removeprefix("c")) for k in keys})
    head = ["Model", "Config.", *(f"c={c} {title}" for c in budgets for title in COLUMNS.values())]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for base, name in product(bases, (WITH, WITHOUT)):
        cells = [shown(found, base, name, c, column) for c in budgets for column in COLUMNS]
        lines.append(f"| {base} | {TITLES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def shown(found: Mapping[str, Row], base: str, name: str, c: int, column: str) -> str:
    """One cell of the table."""
    pair = [found.get(f"{base}.{n}.c{c}.{column}", {}).get("value") for n in (name, *({WITH, WITHOUT} - {name}))]
    value, other = pair
    if value is None:
        return "–"
    text = f"{100 * value:.1f}" if column == "acceptance" else f"{value:.2f}"
    best = column in BETTER and other is not None and BETTER[column](value, other) == value != other
    return f"**{text}**" if best else text
