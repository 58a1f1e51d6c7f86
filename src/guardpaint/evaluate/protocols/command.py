"""`guardpaint eval protocol`: read the prompt files, print the plan, draw and judge, and write the protocol's table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from guardpaint.bases import BaseOptions
from guardpaint.errors import BadInput
from guardpaint.evaluate import benign_files, figures, gather, harness, page, summary
from guardpaint.evaluate.defences.opening import expanded
from guardpaint.evaluate.evaluated_base import CALL, read_call, read_entries
from guardpaint.evaluate.prompt_suites import PromptFiles
from guardpaint.evaluate.protocols import plan, spec, suites, table
from guardpaint.evaluate.rows import EvaluationRow, RowStore
from guardpaint.store.checkpoint import write_atomic
from guardpaint.store.pages import render
from guardpaint.store.results import write_results


@dataclass(frozen=True)
class ProtocolOptions:
    """What `guardpaint eval protocol` is asked to do."""

    name: str
    """Name of a protocol, or its YAML file."""
    data: Path
    bases: Sequence[str]
    """NAME=PATH, or names alone."""
    out: Path
    guard: str | None = None
    judges: Sequence[str] = ()
    """None: the testbed's own, for its own bases."""
    defences: Sequence[str] = ()
    """None: the protocol's."""
    inpainter: str | None = None
    """Inpainting pipeline of the baseline `post_hoc_inpaint`; None leaves that baseline out."""
    n: int | None = None
    """Prompts of each file; None: all."""
    files: PromptFiles = field(default_factory=PromptFiles)
    assigned: Sequence[str] = ()
    """ATTACK=PATTERN of prompt files whose names do not say what they are."""
    calls: Sequence[str] = ()
    """Settings of single bases, as in flux:steps=28,guidance=3.5."""
    opening: BaseOptions = field(default_factory=BaseOptions)
    metrics: Sequence[str] = ()
    pictures: int | None = None
    processes: int = 1
    ray: bool = False
    testbed: str | None = None
    batch: int | None = None
    """Prompts drawn at once; None: chosen by the size of a base's pictures."""

    @cached_property
    def protocol(self) -> spec.Protocol:
        return spec.read(self.name)

    @cached_property
    def suites(self) -> suites.ProtocolFiles:
        return suites.ProtocolFiles(self.protocol, self.data, self.files, self.assigned)

    def run_options(self) -> harness.RunOptions:
        """The run that draws and judges everything."""
        common = self.protocol.settings
        names = list(self.defences or self.protocol.defences)
        if self.inpainter is not None:
            names.insert(-1, f"post_hoc_inpaint@{self.inpainter}")
        if "undefended" not in names:
            names.insert(0, "undefended")  # every cell of the table has it
        return harness.RunOptions(
            suite=str(self.data),
            bases=self.bases,
            defences=names,
            out=self.out,
            guard=self.guard,
            n=self.n,
            pictures=self.pictures,
            judges=tuple(self.judges) or harness.OWN_JUDGE[:1],
            metrics=self.metrics,
            processes=self.processes,
            ray=self.ray,
            testbed=self.testbed,
            opening=replace(self.opening, **{k: getattr(common, k) for k in missing(self.opening, common)}),
            files=self.files,
            calls=self.own_calls(),
            reader=self.suites.read,
            batch=self.batch,
        )

    def own_calls(self) -> list[str]:
        """Settings of single bases: the user's, and the protocol's where the user says nothing."""
        named = {read_call(text)[0] for text in self.calls}
        out = list(self.calls)
        for name in read_entries(self.bases, self.opening):
            column = self.protocol.columns.get(name)
            values = missing(self.opening, column.own) if column and name not in named else {}
            if values:
                out.append(f"{name}:" + ",".join(f"{k}={v}" for k, v in values.items()))
        return out


def missing(given: BaseOptions, wanted: BaseOptions) -> dict[str, Any]:
    """The settings that are wanted and not given."""
    return {k: v for k in CALL if (v := getattr(wanted, k)) is not None and getattr(given, k) is None}


def run(options: ProtocolOptions, plan_only: bool = False) -> Iterator[str]:
    """Run a protocol; yields lines that say what is done. Run it again to resume."""
    asked = options.run_options()
    wanted = expanded(asked.defences)
    cast = harness.Cast.of(asked, wanted)
    if cast.worldless and cast.guard is None and cast.guarded:
        raise BadInput("name the guard with --guard: the embedded one only knows the world it was trained in")
    cast.check_judges()
    found = options.suites.read(options.n, cast.policy())
    yield f"{options.protocol.title}: {options.data}"
    yield from suites.described(options.suites, found.cases)
    lines = list(plan.planned(cast, wanted, found.cases, list(RowStore(options.out).found.values())))
    yield from plan.described(lines, options.processes)
    yield f"defences: {', '.join(wanted)}; judges: {', '.join(asked.judges)}"
    if plan_only:
        return
    yield from harness.run(asked)
    yield from written(options, gather.read_run(options.out), notes_of(lines))


def notes_of(lines: Sequence[plan.Line]) -> list[str]:
    """Why cells of the table are empty."""
    return [f"{line.base} has no {line.defence}: {line.reason}" for line in lines if line.reason]


def written(options: ProtocolOptions, rows: Sequence[EvaluationRow], notes: Sequence[str]) -> Iterator[str]:
    """Write table.md, table.csv, table.json and protocol.html from the rows of a run."""
    of_run = set(read_entries(options.bases, options.opening))
    rows = [r for r in summary.latest(rows) if r.base in of_run]
    found = table.build(options.protocol, rows, options.suites.attack_of)
    settings = dict.fromkeys((r.base, r.drawn_with) for r in rows)
    notes = [
        *(f"{found.protocol.column_title(base)} ({base}): {text}" for base, text in settings),
        f"judges: {', '.join(options.judges) or 'the testbed’s own'}; several decide by majority, a tie is unsafe",
        "a failure of the judge counts against a defence; on an undefended picture its prompt is left out of the cell",
        page.CHECKER_NOTE,
        *notes,
    ]
    write_atomic(options.out / "table.md", found.markdown(notes).encode())
    write_atomic(options.out / "table.csv", found.csv().encode())
    write_results(options.out / "table.json", found.metrics(), [r.to_dict() for r in rows], seed=options.files.seed)
    path = options.out / "protocol.html"
    parts = list(sections(found, rows, notes))
    title = f"{options.protocol.title}: attack success"
    text = render("evaluation.html.j2", title=title, count=len(rows), note="", sections=parts)
    path.write_text(text, encoding="utf-8")
    yield found.markdown()
    yield f"wrote {', '.join(str(options.out / name) for name in ('table.md', 'table.csv', 'table.json'))} and {path}"


def sections(found: table.Table, rows: Sequence[EvaluationRow], notes: Sequence[str]) -> Iterator[page.Section]:
    """The page: the guard's table and heat map first, then the other defences, benign prompts and notes."""
    for title, lines in found.tables():
        yield page.Section(f"{title}: undefended → defended, in percent", table=lines)
        if title == found.defences[0]:
            drawing = figures.change_map(*labelled(found, title))
            yield page.Section(picture=page.plot_picture(drawing), alt="change of attack success")
    if benign := benign_files.metrics(rows):
        yield page.Section("Benign prompts", metrics=benign)
    yield page.Section("Notes", table=[("what holds for this run",), *((note,) for note in notes)])


def labelled(found: table.Table, defence: str) -> tuple[list[list[float | None]], list[str], list[str], str]:
    """The changes of one defence with the names of lines and columns, and a title."""
    titles = [a.title for a in found.protocol.attacks.values()]
    columns = [found.protocol.column_title(b) for b in found.bases]
    return list(table.differences(found, defence)), titles, columns, f"change of attack success with {defence}"
