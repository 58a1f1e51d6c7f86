"""docs/results/benchmarks.json, which several parts write, each keeping the metrics and rows of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput
from guardpaint.store.results import REVISION, read_rows, write_results

OUT = Path("docs/results/benchmarks.json")
Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What one part measured."""

    metrics: Mapping[str, Any]
    """Metrics of `guardpaint.store.results.metric` by name; every name begins with the part's name and a full stop."""
    rows: Sequence[Mapping[str, Any]]
    """The rows that they were computed from. `write` adds the part's name and the revision."""


def write(part: str, measured: Measured, out: Path = OUT) -> Mapping[str, Any]:
    """Replace the metrics and rows of one part, write the file and return the metrics of the part."""
    if wrong := [name for name in measured.metrics if not name.startswith(f"{part}.")]:
        raise BadInput(f"metric {wrong[0]!r}: the metrics of this part are named {part}.NAME")
    stored = json.loads(out.read_text(encoding="utf-8"))["metrics"] if out.exists() else {}
    kept = {name: m for name, m in stored.items() if not name.startswith(f"{part}.")}
    rows = [r for r in read_rows(out) if r["part"] != part]
    if any("part" in r for r in measured.rows):
        raise ValueError(f"rows of {part} may not have a column called part")
    rows += [{"part": part, "git": REVISION, **r} for r in measured.rows]
    rows.sort(key=lambda r: r["part"])
    write_results(out, dict(sorted({**kept, **measured.metrics}.items())), rows, seed=0)
    return measured.metrics
