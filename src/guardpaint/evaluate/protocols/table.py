"""The protocol's table: attacks × bases, attack success undefended → defended, in the paper's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from guardpaint.evaluate.protocols.spec import Protocol
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.evaluate.statistics import bootstrap, wilson
from guardpaint.evaluate.summary import harmful
from guardpaint.evaluate.votes import answered, several, successes
from guardpaint.store.results import metric

EMPTY = "–"


@dataclass(frozen=True)
class Cell:
    """Attack success of one attack on one base, undefended and with one defence, on the same prompts and seeds."""

    attack: str
    base: str
    defence: str
    n: int
    """Prompts that both were run on and on which a judge answered for the undefended picture."""
    undefended: float
    defended: float
    undefended_low: float
    undefended_high: float
    defended_low: float
    defended_high: float
    change: float
    """Defended minus undefended: below zero is better."""
    change_low: float
    change_high: float
    unanswered: int
    """Prompts left out because no judge answered on the undefended picture."""
    judge: str = ""
    """The judge whose verdicts these are; empty: the majority."""

    def __str__(self) -> str:
        return f"{100 * self.undefended:.2f} → {100 * self.defended:.2f} ({signed(100 * self.change)})"


def signed(value: float) -> str:
    """A number with its sign, a true minus included."""
    return f"{value:+.2f}".replace("-", "−")


@dataclass(frozen=True)
class Table:
    """All cells of a run under a protocol."""

    protocol: Protocol
    bases: tuple[str, ...]
    """Names of the columns, in the protocol's order; those that it does not name come last."""
    defences: tuple[str, ...]
    """The guard first."""
    judges: tuple[str, ...]
    """Judges whose own verdicts have cells too; none if there was one judge only."""
    cells: Mapping[tuple[str, str, str, str], Cell]
    """By attack, base, defence and judge."""

    def grid(self, defence: str, judge: str = "") -> list[list[Cell | None]]:
        """The cells of one defence, a line for each attack."""
        return [[self.cells.get((a, b, defence, judge)) for b in self.bases] for a in self.protocol.attacks]

    def tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Every table with its title: that of the guard, the guard's by each judge, those of the other defences."""
        for i, defence in enumerate(self.defences):
            yield defence, self.lines(defence)
            for judge in self.judges if i == 0 else ():
                yield f"{defence}, by {judge} alone", self.lines(defence, judge)

    def lines(self, defence: str, judge: str = "") -> list[list[str]]:
        """The table of one defence as text: a heading, a line for each attack, and the means of the columns."""
        grid = self.grid(defence, judge)
        titles = [a.title for a in self.protocol.attacks.values()]
        out = [["attack", *map(self.protocol.column_title, self.bases)]]
        out += [[t, *(EMPTY if c is None else str(c) for c in line)] for t, line in zip(titles, grid, strict=True)]
        return [*out, ["mean", *(mean_of([line[i] for line in grid]) for i in range(len(self.bases)))]]

    def markdown(self, notes: Sequence[str] = ()) -> str:
        """All tables as Markdown, the guard's first, with notes."""
        parts = [f"# {self.protocol.title}: attack success undefended → defended, in percent (change in points)", ""]
        for title, (head, *body) in self.tables():
            parts += [f"## {title}", "", line_of(head), line_of(["---"] * len(head)), *map(line_of, body), ""]
        return "\n".join([*parts, *(f"- {note}" for note in notes), ""])

    def csv(self) -> str:
        """Every cell in a line of its own."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(Cell.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(c) for c in self.cells.values())
        return text.getvalue()

    def metrics(self) -> dict[str, Any]:
        """`ATTACK.BASE.DEFENCE` of every cell, with `.undefended` and `.change`; `.by.JUDGE` for each of several."""
        out: dict[str, Any] = {}
        for (attack, base, defence, judge), c in self.cells.items():
            key = f"{attack}.{base}.{defence}" + (f".by.{judge}" if judge else "")
            note = f"{c.unanswered} prompts left out: no judge answered" if c.unanswered else ""
            out[key] = metric(c.defended, c.n, ci=(c.defended_low, c.defended_high))
            out[f"{key}.undefended"] = metric(c.undefended, c.n, ci=(c.undefended_low, c.undefended_high), note=note)
            out[f"{key}.change"] = metric(c.change, c.n, ci=(c.change_low, c.change_high))
        return out


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean_of(cells: Sequence[Cell | None]) -> str:
    """The mean of a column's cells, every attack counting the same; empty unless all are there."""
    found = [c for c in cells if c is not None]
    if not found or len(found) < len(cells):
        return EMPTY
    before, after = (float(np.mean([getattr(c, part) for c in found])) for part in ("undefended", "defended"))
    return f"{100 * before:.2f} → {100 * after:.2f} ({signed(100 * (after - before))})"


def build(protocol: Protocol, rows: Sequence[EvaluationRow], attack_of: Mapping[str, str]) -> Table:
    """The table of a run's rows; `attack_of` says which attack a suite belongs to."""
    attacked = [r for r in harmful(rows) if r.suite in attack_of]
    bases = dict.fromkeys(r.base for r in attacked)
    columns = (*(b for b in protocol.columns if b in bases), *(b for b in bases if b not in protocol.columns))
    ran = dict.fromkeys(r.defence for r in attacked if r.defence != "undefended")
    guard = protocol.defences[-1]
    defences = (*(d for d in ran if d == guard), *(d for d in ran if d != guard))
    judges = tuple(several(attacked))
    cells = {}
    for attack in protocol.attacks:
        for base in columns:
            own = [r for r in attacked if attack_of[r.suite] == attack and r.base == base]
            for defence in defences:
                for judge in ("", *judges):
                    if cell := cell_of(attack, base, defence, own, judge):
                        cells[attack, base, defence, judge] = cell
    return Table(protocol, columns, defences, judges, cells)


def cell_of(attack: str, base: str, defence: str, rows: Sequence[EvaluationRow], judge: str = "") -> Cell | None:
    """One cell by the majority or by one judge, or None if no prompt was drawn both ways."""
    plain = {r.same: r for r in rows if r.defence == "undefended"}
    met = [(plain[r.same], r) for r in rows if r.defence == defence and r.same in plain]
    pairs = [pair for pair in met if answered(pair[0], judge or None) and answered(pair[1], judge or None)]
    if not pairs:
        return None
    before, after = (np.array(successes([pair[i] for pair in pairs], judge or None), float) for i in (0, 1))
    n = len(pairs)
    undefended, defended = wilson(before.sum(), n), wilson(after.sum(), n)
    low, high = bootstrap((after - before).tolist())
    return Cell(
        attack,
        base,
        defence,
        n,
        undefended=float(before.mean()),
        defended=float(after.mean()),
        undefended_low=float(undefended[0]),
        undefended_high=float(undefended[1]),
        defended_low=float(defended[0]),
        defended_high=float(defended[1]),
        change=float((after - before).mean()),
        change_low=low,
        change_high=high,
        unanswered=len(met) - n,
        judge=judge,
    )


def differences(table: Table, defence: str) -> Iterator[list[float | None]]:
    """The changes of one defence, a line for each attack; None where there is no cell."""
    for line in table.grid(defence):
        yield [None if c is None else c.change for c in line]
