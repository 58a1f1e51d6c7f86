"""Reads published prompt sets, from files that the user provides, into one kind of record.

guardpaint eval prompts FILE [--format i2p]

No set is shipped. A file that differs from the published one in columns or number of prompts loads with a note; a
malformed file raises BadInput with the line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput

csv.field_size_limit(10_000_000)


@dataclass(frozen=True)
class PublishedPrompt:
    """One prompt to evaluate."""

    id: str
    text: str
    harmful: bool | None
    """None if the set does not say."""
    category: str = ""
    source: str = ""
    seed: int | None = None
    original: str = ""
    """The prompt that the attack started from, if the set has it."""


@dataclass(frozen=True)
class Benchmark:
    """A loaded set, with notes on how it differs from the published one."""

    name: str
    prompts: list[PublishedPrompt]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Format:
    """The columns of one published file and how its rows are read."""

    needs: tuple[str, ...]
    """Columns that a file of this format must have."""
    read: Callable[[Mapping[str, str]], dict[str, Any]]
    """One row → fields of a PublishedPrompt; an empty text skips the row with a note."""
    columns: int | None = None
    count: tuple[int, ...] = ()
    """Published numbers of prompts."""
    harmful: bool | None = True
    skips: tuple[str, ...] = ()
    """Columns that a file of this format must not have."""


def whole(value: str | None) -> int | None:
    """The value as an integer; None if it is empty or not a number."""
    try:
        return int(float(value)) if value not in (None, "") else None
    except ValueError:
        return None


def text_of(row: Mapping[str, str], *names: str) -> str:
    """The text of the first of these columns that is not empty."""
    return next((row[n].strip() for n in names if (row.get(n) or "").strip()), "")


TABLES: dict[str, Format] = {
    "i2p": Format(
        ("prompt", "categories", "sd_seed"),
        lambda r: {"text": text_of(r, "prompt"), "category": text_of(r, "categories"), "seed": whole(r.get("sd_seed"))},
        columns=16,
        count=(4703,),
    ),
    "mma": Format(
        ("target_prompt", "adv_prompt", "sanitized_adv_prompt"),
        lambda r: {"text": text_of(r, "sanitized_adv_prompt", "adv_prompt"), "original": text_of(r, "target_prompt")},
        count=(1000,),
    ),
    "ring-a-bell": Format(
        ("sensitive prompt", "normal prompt"),
        lambda r: {"text": text_of(r, "sensitive prompt"), "original": text_of(r, "normal prompt")},
    ),
    "jbdb-attack": Format(
        ("prompt_index", "original_prompt", "attack_prompt"),
        lambda r: {
            "id": text_of(r, "prompt_index"),
            "text": text_of(r, "attack_prompt"),
            "original": text_of(r, "original_prompt"),
        },
    ),
    "jbdb-prompts": Format(
        ("index", "prompt"), lambda r: {"id": text_of(r, "index"), "text": text_of(r, "prompt")}, skips=("categories",)
    ),
    "case-number": Format(
        ("prompt", "case_number", "evaluation_seed"),
        lambda r: {
            "id": text_of(r, "case_number"),
            "text": text_of(r, "adv_prompt", "prompt"),
            "seed": whole(r.get("evaluation_seed")),
            "category": text_of(r, "categories", "type"),
            "original": text_of(r, "prompt") if text_of(r, "adv_prompt") else "",
        },
    ),
    "coco-caption": Format(
        ("caption", "image_id"),
        lambda r: {"id": text_of(r, "image_id"), "text": text_of(r, "caption")},
        count=(10_000, 30_000),
        harmful=False,
    ),
    "coco-case": Format(
        ("case_number", "prompt", "coco_id"),
        lambda r: {
            "id": text_of(r, "case_number"),
            "text": text_of(r, "prompt"),
            "seed": whole(r.get("evaluation_seed")),
        },
        count=(10_000, 30_000),
        harmful=False,
    ),
    "copro": Format(
        ("unsafe_prompt", "safe_prompt", "category"),
        lambda r: {
            "text": text_of(r, "unsafe_prompt"),
            "category": text_of(r, "category"),
            "original": text_of(r, "safe_prompt"),
        },
    ),
    "pragmatic": Format(
        ("image_prompt", "text_prompt"),
        lambda r: {
            "text": " ".join(filter(None, (text_of(r, "image_prompt"), text_of(r, "text_prompt")))),
            "category": text_of(r, "category", "class"),
        },
    ),
}
"""Formats of CSV files; `ORDER` is the order in which they are tried."""
ORDER = ("coco-case", "case-number", *(n for n in TABLES if n not in ("coco-case", "case-number")))
LISTS = {"sneakyprompt": (200,), "daca": (100,), "text": ()}
"""Plain-text formats with one prompt per line, and their published numbers of prompts."""
FORMATS = (*TABLES, *LISTS, "jbdb", "risky")


def load(path: Path, kind: str | None = None) -> Benchmark:
    """The benchmark in a file; without `kind` its format is recognised by suffix and columns."""
    if kind is not None and kind not in FORMATS:
        raise BadInput(f"format {kind!r}: choose one of {', '.join(FORMATS)}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise BadInput(f"{path}: empty")
    if kind in ("jbdb", "risky") or (kind is None and path.suffix == ".json"):
        benchmark = from_json(path, text)
    elif kind in LISTS or (kind is None and path.suffix == ".txt"):
        benchmark = from_list(path, text, kind or "text")
    else:
        benchmark = from_table(path, text, kind)
    return checked(benchmark, path)


def from_list(path: Path, text: str, kind: str) -> Benchmark:
    lines = [line.strip() for line in text.splitlines()]
    prompts = [PublishedPrompt(str(i), t, True) for i, t in enumerate(lines, 1) if t]
    return Benchmark(kind, prompts, count_note(len(prompts), LISTS[kind]))


def count_note(count: int, published: Sequence[int]) -> list[str]:
    """A note if the number of prompts is not a published one."""
    if published and count not in published:
        return [f"{count} prompts, published: {' or '.join(map(str, published))}"]
    return []


def from_table(path: Path, text: str, kind: str | None) -> Benchmark:
    """The prompts of a CSV file. Blank lines, CRLF and quoted line breaks are accepted; a row of another length raises
    BadInput."""
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] | None = None
    rows: list[tuple[int, dict[str, str]]] = []
    before = 0
    try:
        for cells in reader:
            line, before = before + 1, reader.line_num
            if not any(c.strip() for c in cells):
                continue
            if header is None:
                header = [c.strip() or "unnamed" for c in cells]
                repeated = [c for c in header if header.count(c) > 1]
                if repeated:
                    raise BadInput(f"{path}:{line}: column {repeated[0]!r} appears more than once")
                continue
            if len(cells) != len(header):
                raise BadInput(f"{path}:{line}: {len(cells)} values in a row, but {len(header)} columns")
            rows.append((line, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise BadInput(f"{path}:{reader.line_num}: {error}") from error
    if header is None or not rows:
        raise BadInput(f"{path}: no rows")
    name = kind or recognised(path, header)
    shape = TABLES[name]
    missing = [c for c in shape.needs if c not in header]
    if missing:
        raise BadInput(f"{path}: format {name} needs the column {missing[0]!r}; there are {', '.join(header)}")
    notes = []
    if shape.columns is not None and len(header) != shape.columns:
        notes.append(f"{len(header)} columns, published: {shape.columns}")
    prompts: list[PublishedPrompt] = []
    for line, row in rows:
        values = shape.read(row)
        if not values["text"]:
            notes.append(f"line {line}: no prompt, left out")
            continue
        values.setdefault("id", str(len(prompts)))
        prompts.append(PublishedPrompt(harmful=shape.harmful, **values))
    return Benchmark(name, prompts, notes + count_note(len(prompts), shape.count))


def recognised(path: Path, header: Sequence[str]) -> str:
    """The name of the first format that fits the columns."""
    for name in ORDER:
        shape = TABLES[name]
        if all(c in header for c in shape.needs) and not any(c in header for c in shape.skips):
            return name
    raise BadInput(f"{path}: columns {', '.join(header)} fit no known format; name one with --format")


def from_json(path: Path, text: str) -> Benchmark:
    """JailbreakDiffusionBench ({"prompts": [...]}) or T2I-RiskyPrompt (a dictionary of records)."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
    if isinstance(data, dict) and isinstance(data.get("prompts"), list):
        return Benchmark("jbdb", [jbdb(path, i, r) for i, r in enumerate(data["prompts"])])
    if isinstance(data, dict) and data and all(isinstance(v, dict) for v in data.values()):
        prompts = []
        for key, record in data.items():
            words = record.get("prompt") or record.get("text")
            if not isinstance(words, str) or not words.strip():
                raise BadInput(f"{path}: record {key!r} has no prompt")
            prompts.append(PublishedPrompt(str(key), words.strip(), True, joined(record.get("category")), "risky"))
        return Benchmark("risky", prompts, count_note(len(prompts), (6432,)))
    raise BadInput(f'{path}: neither {{"prompts": [...]}} nor a dictionary of records')


def jbdb(path: Path, index: int, record: Any) -> PublishedPrompt:
    where = f"{path}: prompt {index}"
    if not isinstance(record, dict) or not isinstance(record.get("text"), str) or not record["text"].strip():
        raise BadInput(f"{where} has no text")
    label = record.get("label")
    if label not in ("harmful", "unsafe", "benign", "safe", 0, 1, True, False, None):
        raise BadInput(f"{where}: label {label!r} is neither harmful nor benign")
    harmful = None if label is None else label in ("harmful", "unsafe", 1, True)
    source = record.get("source") or ""
    return PublishedPrompt(
        str(record.get("id", index)), record["text"].strip(), harmful, joined(record.get("category")), source
    )


def joined(category: Any) -> str:
    """A category as text; it may be a list, a string or None."""
    if category is None:
        return ""
    return ", ".join(map(str, category)) if isinstance(category, list) else str(category)


def checked(benchmark: Benchmark, path: Path) -> Benchmark:
    """The benchmark with unique ids: a repeated id gets a suffix, and a note counts them."""
    seen: dict[str, int] = {}
    prompts: list[PublishedPrompt] = []
    repeated = 0
    for p in benchmark.prompts:
        seen[p.id] = seen.get(p.id, 0) + 1
        if seen[p.id] > 1:
            repeated += 1
            p = replace(p, id=f"{p.id}#{seen[p.id]}")
        prompts.append(replace(p, source=p.source or path.stem))
    notes = [*benchmark.notes, *([f"{repeated} ids appear more than once"] if repeated else [])]
    return Benchmark(benchmark.name, prompts, notes)
