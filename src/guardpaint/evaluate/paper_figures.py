"""The paper's figures and tables, in its layout, from the rows of any run.

guardpaint eval figures runs/jdb --out runs/jdb/figures
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardpaint.bases import BaseOptions
from guardpaint.errors import BadInput
from guardpaint.evaluate import figures, gather, gtp, summary, tournament_rows
from guardpaint.evaluate.defences.opening import open_guard
from guardpaint.evaluate.evaluated_base import open_base, read_entries
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.evaluate.statistics import mean
from guardpaint.evaluate.votes import attack_success
from guardpaint.store.checkpoint import read_json, write_atomic
from guardpaint.store.images import save_image

COLUMNS = ("base", "rule", "n", "asr", "accepted", "tournaments", "seconds")
"""Of the reinsertion table: attack success, then accepted repairs, tournaments and seconds for each prompt."""


@dataclass(frozen=True)
class FigureOptions:
    """What `guardpaint eval figures` is asked to do."""

    run: Path
    out: Path
    defence: str = "ours"
    tournaments: int = 0
    """Repaired prompts whose tournaments are drawn once more; needs `bases`."""
    bases: Sequence[str] = ()
    """NAME=PATH of the bases that tournaments are drawn on."""
    guard: str | None = None
    opening: BaseOptions = field(default_factory=BaseOptions)
    calls: Sequence[str] = ()
    clear: bool = False
    """Whether tournaments are shown without blur."""
    results: Path | None = None
    """Results of `eval gtp`; None: gtp.json in the run."""

    @property
    def gtp(self) -> Path:
        return self.results or self.run / "gtp.json"

    def __post_init__(self) -> None:
        if self.results is not None and not self.results.is_file():
            raise BadInput(
                f"{self.results}: no such file; measure it with `guardpaint eval gtp --results {self.results}`"
            )


def reinsertion(rows: summary.Rows) -> list[dict[str, Any]]:
    """The reinsertion table: a line for each base and rule."""
    out = []
    named = [(m[1], r) for r in summary.harmful(rows) if (m := figures.RULE.match(r.defence))]
    for base, rule in dict.fromkeys((r.base, rule) for rule, r in named):
        own = [r for name, r in named if (r.base, name) == (base, rule)]
        accepted, tournaments = ([float(r.detail.get(k) or 0) for r in own] for k in ("accepted", "tournaments"))
        values = (attack_success(own, None)["value"], *(mean(v, None)["value"] for v in (accepted, tournaments)))
        seconds = mean([float(r.seconds) for r in own], None)["value"]
        out.append(dict(zip(COLUMNS, (base, rule, len(own), *values, seconds), strict=True)))
    return out


def table_csv(lines: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def table_markdown(lines: Sequence[dict[str, Any]]) -> str:
    """The reinsertion table as Markdown."""
    heads = ("base", "rule", "n", "attack success", "accepted a prompt", "tournaments a prompt", "seconds a prompt")
    out = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for line in lines:
        numbers = ("–" if line[k] is None else f"{line[k]:.3g}" for k in COLUMNS[3:])
        out.append(f"| {line['base']} | {line['rule']} | {line['n']} | {' | '.join(numbers)} |")
    return "\n".join([*out, ""])


def run(options: FigureOptions) -> Iterator[str]:
    """Write every figure and table for which the run has rows; yields their paths."""
    rows = summary.latest(gather.read_run(options.run))
    options.out.mkdir(parents=True, exist_ok=True)
    written = [*plots(rows, options), *sheets(rows, options), *tables(rows, options)]
    if not written:
        raise BadInput(f"{options.run}: no rows of harmful prompts with {options.defence} beside undefended ones")
    yield from map(str, written)


def plots(rows: summary.Rows, options: FigureOptions) -> Iterator[Path]:
    """The heat map of changes, and panels of candidates and audits: the whole guard, and the trajectory alone."""
    grid, *_ = figures.changes(rows, options.defence)
    found: dict[str, Any] = {}
    if any(v is not None for line in grid for v in line):
        found["change"] = figures.heat_map(rows, options.defence)
    for name, whole in (("size", True), ("size-trajectory", False)):
        if (panels := figures.size_panels(rows, whole)) is not None:
            found[name] = panels
    for name, plot in found.items():
        path = options.out / f"{name}.png"
        plot.savefig(path, dpi=110)
        yield path


def sheets(rows: summary.Rows, options: FigureOptions) -> Iterator[Path]:
    """Qualitative pairs, reinsertion rules side by side, and tournaments."""
    attacked = [r for r in summary.harmful(rows) if not r.image or (options.run / r.image).exists()]
    found = {
        "pairs": figures.pairs_sheet(attacked, options.run, defence=options.defence),
        "reinsertion": figures.reinsertion_sheet(attacked, options.run),
        "tournaments": tournament_rows.sheet(list(redrawn(attacked, options))),
    }
    for name, sheet in found.items():
        if sheet is not None:
            path = options.out / f"{name}.png"
            save_image(sheet, path)
            yield path


def tables(rows: summary.Rows, options: FigureOptions) -> Iterator[Path]:
    """The table of the tournament policy as Markdown, and the reinsertion table as Markdown and CSV."""
    if options.gtp.is_file():
        path = options.out / "gtp.md"
        write_atomic(path, gtp.table(measured(options.gtp)).encode())
        yield path
    if lines := reinsertion(rows):
        for suffix, text in (("md", table_markdown(lines)), ("csv", table_csv(lines))):
            path = options.out / f"reinsertion.{suffix}"
            write_atomic(path, text.encode())
            yield path


def measured(path: Path) -> dict[str, Any]:
    """The metrics of a results file."""
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("metrics"), dict):
        raise BadInput(f"{path}: no results file; write it with `guardpaint eval gtp --results {path}`")
    return dict(found["metrics"])


def redrawn(rows: Sequence[EvaluationRow], options: FigureOptions) -> Iterator[tournament_rows.Contest]:
    """The tournaments of prompts on which the run accepted a repair, drawn once more with the same seeds."""
    if not options.tournaments:
        return
    if not options.bases:
        raise BadInput("tournaments are drawn once more: name the bases with --base NAME=PATH, and the --guard")
    guard = open_guard(options.guard)
    for name, entry in read_entries(options.bases, options.opening, options.calls).items():
        won = [r for r in rows if (r.base, r.defence) == (name, options.defence) and r.detail.get("accepted")]
        base = open_base(entry, None)
        for r in won[: options.tournaments]:
            yield from tournament_rows.contests(guard, base, r.prompt, r.seed, options.clear)
