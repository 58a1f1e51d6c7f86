"""From a file, or a folder of files, to prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from guardpaint.data.prompt_files import columns as read
from guardpaint.data.prompt_files.containers import KINDS, open_records, stem_of, suffix_of
from guardpaint.data.prompt_files.datasets import DATASETS, Dataset, named, recognised
from guardpaint.data.prompt_files.records import Benchmark, PublishedPrompt, Records
from guardpaint.errors import BadInput

LAYOUTS = ("table", "text")
"""Formats that say nothing of what a set is: its columns as they are, and one prompt in each line."""
FORMATS = (*dict.fromkeys(d.name for d in DATASETS), *LAYOUTS)
WORDS = 2
"""A list with at most so many words in half of its lines is taken for a list of words."""


@dataclass(frozen=True)
class Reading:
    """What the user says of a prompt file."""

    format: str | None = None
    """The known set that it is, or one of `LAYOUTS`; None: recognised by name and columns."""
    column: str | None = None
    """The column of the prompts; None: the set's own."""
    harmful: bool | None = None
    """Whether its prompts are harmful, where its records do not say it; None: as the table of known sets says."""

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise BadInput(f"format {self.format!r}: choose one of {', '.join(FORMATS)}")


def load(path: Path, kind: str | None = None, column: str | None = None, harmful: bool | None = None) -> Benchmark:
    """The prompts of a file; the arguments are those of `Reading`."""
    reading = Reading(kind, column, harmful)
    records = open_records(path, lines=kind == "text")
    stem = stem_of(path)
    dataset = None if kind in LAYOUTS else named(kind, records) if kind else recognised(path, stem, records)
    if dataset is not None and kind is not None:
        missing = [c for c in dataset.needs if not read.find(records.columns, (c,))]
        if missing:
            listed = ", ".join(records.columns)
            raise BadInput(f"{path}: format {kind} needs the column {missing[0]!r}; there are {listed}")
    return Loaded(path, stem, records, reading, dataset).benchmark()


def load_all(folder: Path, reading: Reading) -> tuple[dict[Path, Benchmark], list[str]]:
    """The prompts of all prompt files below a folder in the order of their paths, and why others are left out."""
    found: dict[Path, Benchmark] = {}
    left_out: list[str] = []
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not hidden(p.relative_to(folder)))
    suited = [p for p in files if suffix_of(p) in ("", *KINDS)]
    for path in suited:
        name = path.relative_to(folder)
        try:
            benchmark = load(path, reading.format, reading.column, reading.harmful)
        except BadInput as error:
            left_out.append(f"{name}: left out, {str(error).removeprefix(f'{path}: ')}")
            continue
        if suffix_of(path) or benchmark.name != "text":
            found[path] = benchmark
        else:
            left_out.append(f"{name}: left out, a text without suffix; if it holds prompts, name it alone")
    if len(suited) < len(files):
        left_out.append(f"{len(files) - len(suited)} files are no prompt files by their suffix")
    if not found:
        raise BadInput(f"{folder}: a folder without a prompt file" + "".join(f"\n{line}" for line in left_out[:9]))
    return found, left_out


def hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


@dataclass(frozen=True)
class Loaded:
    """A file's records with all that is known of their meaning."""

    path: Path
    stem: str
    records: Records
    reading: Reading
    dataset: Dataset | None

    def benchmark(self) -> Benchmark:
        """The prompts and notes; raises BadInput if the file holds none."""
        column = self.prompt_column()
        labels = read.labels_of(self.path, self.records, bool(self.dataset and self.dataset.labelled))
        prompts, notes = [], self.differences()
        for (place, row), label in zip(self.records.rows, labels, strict=True):
            text = read.prompt_text(row, column)
            if not text:
                if not read.find(list(row), (column,)):
                    raise BadInput(f"{self.path}: {place} has no {column}")
                notes.append(f"{place}: no prompt, left out")
                continue
            prompts.append(self.prompt(row, column, text, label, len(prompts)))
        if not prompts:
            raise BadInput(f"{self.path}: no prompts in {len(self.records.rows)} records")
        self.refuse_words(prompts)
        prompts, repeated = unique(prompts)
        return Benchmark(self.name(), prompts, [*notes, *repeated, *self.said(prompts)])

    def name(self) -> str:
        if self.dataset is not None:
            return self.dataset.name
        return "text" if "lines" in self.records.layout else self.records.layout

    def prompt_column(self) -> str:
        wanted = self.reading.column
        if wanted is None and self.dataset is not None:
            wanted = self.dataset.prompt
        return read.prompt_column(self.path, self.records, wanted)

    def stated(self, column: str) -> bool | None:
        """What the user or the table of known sets says of the prompts in a column."""
        if self.reading.harmful is not None or self.dataset is None:
            return self.reading.harmful
        return {k.lower(): v for k, v in self.dataset.others.items()}.get(column.lower(), self.dataset.harmful)

    def prompt(self, row: read.Row, column: str, text: str, label: bool | None, index: int) -> PublishedPrompt:
        grouped = self.dataset is not None and self.dataset.groups
        categories = () if grouped else read.categories_of(row)
        harmful = self.stated(column) if label is None else label
        if read.DISCARD in categories:
            harmful = None
        original = "" if self.reading.column else read.text_of(row, *read.PROMPTS.get(column.lower(), ()))
        return PublishedPrompt(
            id=read.text_of(row, *read.IDS) or str(index),
            text=text,
            harmful=harmful,
            categories=categories,
            source=read.text_of(row, "source") or self.stem,
            seed=read.whole(read.value_of(row, read.SEEDS)),
            original=original,
            guidance=read.real(read.value_of(row, read.GUIDANCE)),
            size=read.size_of(row),
            harm=self.dataset.harm(self.stem) if harmful and self.dataset is not None else "",
        )

    def differences(self) -> list[str]:
        """Notes on numbers that are not the published ones."""
        dataset, notes = self.dataset, []
        if dataset is not None and dataset.widths and len(self.records.columns) not in dataset.widths:
            notes.append(f"{len(self.records.columns)} columns, published: {either(dataset.widths)}")
        if dataset is not None and dataset.counts and len(self.records.rows) not in dataset.counts:
            notes.append(f"{len(self.records.rows)} prompts, published: {either(dataset.counts)}")
        return notes

    def said(self, prompts: Sequence[PublishedPrompt]) -> list[str]:
        """Notes on what is not known of the prompts."""
        discarded = sum(read.DISCARD in p.categories for p in prompts)
        unknown = sum(p.harmful is None for p in prompts)
        notes = [f"{discarded} prompts were discarded by annotators: neither harmful nor benign"] if discarded else []
        if unknown > discarded:
            notes.append(f"nothing says whether {unknown} prompts are harmful; say it with --harmful or --benign")
        return notes

    def refuse_words(self, prompts: Sequence[PublishedPrompt]) -> None:
        """Raise BadInput for a list that looks like words to filter; a format that is named is believed."""
        if self.records.layout != "lines" or self.dataset is not None or self.reading.format is not None:
            return
        if statistics.median(len(p.text.split()) for p in prompts) <= WORDS:
            raise BadInput(
                f"{self.path}: a list of words, not of prompts (half of its lines have at most {WORDS} words); "
                "if each line is a prompt, say --format text"
            )


def either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))


def unique(prompts: Sequence[PublishedPrompt]) -> tuple[list[PublishedPrompt], list[str]]:
    """The prompts with unique ids: a repeated id gets a suffix, and a note counts them."""
    seen: dict[str, int] = {}
    found: list[PublishedPrompt] = []
    for p in prompts:
        seen[p.id] = seen.get(p.id, 0) + 1
        found.append(replace(p, id=f"{p.id}#{seen[p.id]}") if seen[p.id] > 1 else p)
    repeated = len(prompts) - len(seen)
    return found, [f"{repeated} ids appear more than once"] if repeated else []
