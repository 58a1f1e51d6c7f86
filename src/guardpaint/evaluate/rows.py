"""The row that an evaluation stores for every picture: typed here, one flat JSON object on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from guardpaint.store.rows import append_rows, read_rows
from guardpaint.types import SAFE

KNOWN = ("found", "passed_filter", "queries")
"""Results of the search for an attack prompt: whether it succeeded, whether it passed the filter, its queries."""
DETAIL = ("triggered", "audits", "tournaments", "accepted", "edited", "ladder", "error", "reason")
"""Details that defences report; a row also lists the names of its own."""
RIGHT = "right_"
"""Prefix of the columns that say whether a requested attribute is present."""
VOTE, RAW, HARM, BY, PROBLEM = "vote.", "raw.", "harm.", "by.", "problem."
"""Prefixes of the columns of one judge's vote; the judge's name follows."""
VOTES = (VOTE, RAW, HARM, BY, PROBLEM)


@dataclass(frozen=True)
class Vote:
    """What one judge of several said of a picture."""

    said: str
    """The category that it names; empty if it failed."""
    raw: str = ""
    """Its answer as it was given."""
    harm: float | None = None
    """How unsafe it finds the picture, from 0 to 1, if it can tell."""
    by: str = ""
    """Hash of the judge; a vote of the same judge on the same picture is not asked for again."""
    problem: str = ""
    """Why it failed; empty if it answered."""

    @property
    def failed(self) -> bool:
        return not self.said

    @property
    def unsafe(self) -> bool:
        """Whether it found harm; a judge that failed found none."""
        return bool(self.said) and self.said != SAFE

    def to_dict(self, name: str) -> dict[str, Any]:
        full = {VOTE: self.said, RAW: self.raw, HARM: self.harm, BY: self.by, PROBLEM: self.problem}
        return {f"{prefix}{name}": value for prefix, value in full.items() if prefix == VOTE or value not in ("", None)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], name: str) -> Vote:
        harm = row.get(f"{HARM}{name}")
        texts = (row.get(f"{prefix}{name}") or "" for prefix in (VOTE, RAW, BY, PROBLEM))
        said, raw, by, problem = map(str, texts)
        return cls(said, raw, None if harm is None else float(harm), by, problem)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one picture, by one judge or the majority of several, and the scores of the metrics."""

    judge: str = ""
    """Hash of the judges and the names of the metrics."""
    released: bool = False
    failed: bool = False
    """Whether no judge answered; the picture then counts as unsafe."""
    said: str = ""
    """The category that is named; empty if nothing was released."""
    unsafe: bool = False
    """A judge that failed counts as one that found harm, and so does a tie."""
    right: Mapping[str, bool] = field(default_factory=dict)
    """For each requested attribute that was judged: whether it is present."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the picture by name; `NAME_failed` says why one has no value."""
    votes: Mapping[str, Vote] = field(default_factory=dict)
    """The vote of every judge by name; none if nothing was released, or if the row is older than votes."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "judge": self.judge,
            "released": int(self.released),
            "judge_failed": int(self.failed),
            **self.scores,
            "said": self.said,
            "unsafe": int(self.unsafe),
            **{f"{RIGHT}{name}": int(value) for name, value in self.right.items()},
            **{k: v for name, vote in self.votes.items() for k, v in vote.to_dict(name).items()},
        }


@dataclass(frozen=True)
class EvaluationRow:
    """One prompt, run through one defence on one base, with the verdict on the result."""

    key: str
    """Hash of everything that decides the picture."""
    suite: str
    base: str
    defence: str
    config: str
    """Hash of the defence's and the base's weights and settings."""
    id: str
    kind: str
    category: str
    prompt: str
    seed: int
    status: str
    seconds: float
    threads: int
    image: str
    """File of the kept picture, relative to the run; empty if it was not kept."""
    git: str
    """Revision of the code that drew it."""
    picture: str
    """Hash of the pixels; empty if nothing was released."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Details that the defence reports, by the names in `DETAIL` and others."""
    known: Mapping[str, int] = field(default_factory=dict)
    """Results of the search for an attack prompt, by the names in `KNOWN`."""
    verdict: Verdict = field(default_factory=Verdict)
    source: str = ""
    """The set that a prompt of a file comes from; empty for prompts of a testbed."""
    drawn_with: str = ""
    """Steps, guidance, size and sampler of the base."""
    run: str = ""
    """Folder of the run; set only where rows of several runs are combined."""

    @property
    def triggered(self) -> bool:
        return bool(self.detail.get("triggered"))

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.suite, self.base, self.defence

    @property
    def scene(self) -> int | str:
        """What pictures must share to count as one item in intervals: a testbed's scene, or a file's prompt."""
        return self.prompt if self.source else self.seed

    @property
    def same(self) -> tuple[str, str, str, int]:
        """What two defences must share to be compared: suite, base, prompt and seed."""
        return self.suite, self.base, self.prompt, self.seed

    def to_dict(self) -> dict[str, Any]:
        """The stored form: one flat dictionary."""
        drawn = {name: getattr(self, name) for name in DRAWN}
        named = {name: getattr(self, name) for name in NAMED if getattr(self, name)}
        parts = {**self.known, **self.detail, **self.verdict.to_dict()}
        return {**drawn, "detail": sorted(self.detail), **parts, **named}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> EvaluationRow:
        """Read the stored form; rows of earlier versions may lack the names of their details, judge and revision."""
        names = dict.fromkeys((*(row.get("detail") or ()), *DETAIL))
        detail = {name: row[name] for name in names if name in row}
        known = {name: int(row[name]) for name in KNOWN if name in row}
        right = {k.removeprefix(RIGHT): bool(v) for k, v in row.items() if k.startswith(RIGHT) and v is not None}
        verdict = Verdict(
            judge=row.get("judge") or "",
            released=bool(row["released"]),
            failed=bool(row["judge_failed"]),
            said=row.get("said") or "",
            unsafe=bool(row["unsafe"]),
            right=right,
            scores={k: v for k, v in row.items() if k not in FLAT and k not in names and not k.startswith(PREFIXES)},
            votes={
                k.removeprefix(VOTE): Vote.from_dict(row, k.removeprefix(VOTE))
                for k, v in row.items()
                if k.startswith(VOTE) and v is not None
            },
        )
        missing: dict[str, Any] = {"git": "unknown", "threads": 0, "config": "", "picture": "", "image": ""}
        drawn = {name: row.get(name, missing[name]) if name in missing else row[name] for name in DRAWN}
        named: dict[str, Any] = {name: row.get(name) or "" for name in NAMED}
        return cls(**drawn, **named, detail=detail, known=known, verdict=verdict)


NAMED = ("source", "drawn_with", "run")
"""Fields that are stored only where they have a value."""
DRAWN = tuple(f.name for f in fields(EvaluationRow) if f.name not in ("detail", "known", "verdict", *NAMED))
"""Fields that describe the drawing and do not depend on the judge."""
FLAT = {*DRAWN, *KNOWN, *NAMED, "detail", "judge", "released", "judge_failed", "said", "unsafe"}
"""Names in the stored form that are not scores of a metric."""
PREFIXES = (RIGHT, *VOTES)
"""Beginnings of such names."""


class RowStore:
    """The append-only rows of a run, by key; a last line that a crash left half-written is dropped."""

    def __init__(self, out: Path) -> None:
        self.path = out / "rows.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, EvaluationRow] = {}
        for stored in read_rows(self.path):
            row = EvaluationRow.from_dict(stored)
            self.found[row.key] = row

    def add(self, rows: Iterable[EvaluationRow]) -> None:
        """Append rows; a later row of the same key replaces the earlier one."""
        rows = list(rows)
        append_rows(self.path, (row.to_dict() for row in rows))
        self.found |= {row.key: row for row in rows}


def write_parquet(rows: Sequence[EvaluationRow], path: Path) -> None:
    """Write all rows as one table; columns that a row does not have are null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stored = [r.to_dict() for r in rows]
    columns = list(dict.fromkeys(k for r in stored for k in r))
    pq.write_table(pa.Table.from_pylist([{c: r.get(c) for c in columns} for r in stored]), path)


def read_parquet(path: Path, run: str = "") -> list[EvaluationRow]:
    """Read the rows that `write_parquet` wrote, and mark them as rows of `run`."""
    import pyarrow.parquet as pq

    stored = pq.read_table(path).to_pylist()
    return [EvaluationRow.from_dict({**{k: v for k, v in r.items() if v is not None}, "run": run}) for r in stored]
