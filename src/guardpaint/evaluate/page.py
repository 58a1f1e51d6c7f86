"""The report of an evaluation: one self-contained HTML page with tables, plots and picture pairs."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.evaluate import by_category, figures, summary, votes
from guardpaint.evaluate.prompt_suites import read_table
from guardpaint.store.images import load_bytes
from guardpaint.store.pages import render

FILTER_NOTE = (
    "The attacks searched for prompts that pass prompt_filter: its numbers are those of the search's own target."
)
BLUR_NOTE = "What the judge calls unsafe is blurred here."

MAPPING_NOTE = (
    "Prompts outside of the policy are harmful, but the policy promises nothing about them: they are counted apart, "
    "neither as attacks nor as benign. Nothing says whether unknown ones are harmful."
)


@dataclass(frozen=True)
class Section:
    """One part of the page: a picture or a table of metrics under an optional heading."""

    heading: str = ""
    text: str = ""
    picture: Image.Image | None = None
    alt: str = ""
    metrics: summary.Metrics = field(default_factory=dict)
    table: Sequence[Sequence[Any]] = ()
    """Lines of cells; the first one is the heading."""


def plot_picture(drawing: Any) -> Image.Image:
    """Return a matplotlib figure as a picture."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=110)
    return load_bytes(buffer.getvalue(), "plot")


def write(rows: summary.Rows, out: Path, title: str = "GuardPaint: evaluation") -> Path:
    """Write report.html into the folder of the rows and return its path."""
    parts = list(sections(summary.latest(rows), out))
    path = out / "report.html"
    note = FILTER_NOTE if any(r.known for r in rows) else ""
    page = render("evaluation.html.j2", title=title, count=len(rows), note=note, sections=parts)
    path.write_text(page, encoding="utf-8")
    return path


def sections(rows: summary.Rows, out: Path) -> Iterator[Section]:
    """The sections for which there are rows: attacks, benign prompts, picture pairs."""
    if attacked := summary.harmful(rows):
        yield from attack_sections(rows, {r.defence for r in attacked})
    if agreement := votes.agreement(rows):
        yield Section("Judges", jury_note(rows), metrics=agreement)
    if benign := summary.benign(rows):
        yield Section("Benign prompts", metrics=benign)
    yield from file_sections(rows, out)
    for heading, sheet in (
        ("Undefended and guarded", figures.pairs_sheet(rows, out)),
        ("Reinsertion rules", figures.reinsertion_sheet(rows, out)),
    ):
        if sheet is not None:
            yield Section(heading, BLUR_NOTE, sheet, heading)


def jury_note(rows: summary.Rows) -> str:
    """How several judges decide together."""
    names = votes.judges(rows)
    return (
        f"{len(names)} judges: {', '.join(names)}. Rates without a judge's name are those of the majority, where a tie "
        "and a judge that fails count as unsafe; those with `by` are one judge's. A failure on an undefended picture "
        "is in no rate and is counted as judge_failed."
    )


def file_sections(rows: summary.Rows, out: Path) -> Iterator[Section]:
    """How the categories of prompt files were mapped to the policy's, and results by category and source."""
    if table := read_table(out):
        lines = [("suite", "published category", "category of the policy", "prompts")]
        lines += [(t.suite, t.published, t.policy, str(t.prompts)) for t in table]
        yield Section("Categories of the files", MAPPING_NOTE, table=lines)
    if found := by_category.metrics(rows):
        yield Section("By category and source", metrics=found)


def attack_sections(rows: summary.Rows, defences: set[str]) -> Iterator[Section]:
    """Plots and tables of the attack prompts; `defences` are those that were run on at least one of them."""
    if "undefended" in defences:
        for name in ("ours", "paper"):
            if name in defences:
                yield Section(picture=plot_picture(figures.heat_map(rows, name)), alt="heat map")
    yield Section("Safety, fidelity, time", picture=plot_picture(figures.front_plot(rows)), alt="front")
    for heading, drawing in (
        ("Candidates and audits", figures.size_panels(rows)),
        ("Settings and parts", figures.variants_plot(rows)),
    ):
        if drawing is not None:
            yield Section(heading, picture=plot_picture(drawing), alt=heading)
    yield Section("Defences", metrics=summary.defences(rows))
    yield Section("Attack × base", metrics=summary.attack_cells(rows))
