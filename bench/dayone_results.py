"""docs/results/dayone.json, which several scripts write, each keeping the rows of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput
from guardpaint.store.results import REVISION, metric, read_rows, write_results

OUT = Path("docs/results/dayone.json")
Row = dict[str, Any]


def true(value: Any) -> bool:
    """A flag of a row, which is text once it was read from a file."""
    return value in (True, "True", 1, "1")


def half_precision(rows: Sequence[Row]) -> dict[str, Any]:
    """How many families ran one guarded step from every folder, and whether a base ran one in half precision."""
    folders = [r for r in rows if r["loaded"] == "fp32"]
    families = sorted({r["family"] for r in folders})
    ran = [f for f in families if all(true(r["ok"]) for r in folders if r["family"] == f)]
    note = f"{len(folders)} folders of random-initialised classes, loaded as fp32: {', '.join(ran)}"
    found = {"half_precision_families_ok": metric(len(ran), len(families), goal=">=4", note=note)}
    half = [true(r["ok"]) for r in rows if r["loaded"] != "fp32"]
    if half:
        found["half_precision_steps_ok"] = metric(sum(half), len(half), goal=f">={len(half)}")
    return found


MAKERS: dict[str, Callable[[Sequence[Row]], dict[str, Any]]] = {"half_precision": half_precision}
"""Metrics of each part from its rows, which are text once they were read from the file."""


def write(part: str, rows: Sequence[Row], out: Path) -> dict[str, Any]:
    """Replace the rows of one part, write the file and return its metrics. Rows name their own revision."""
    if part not in MAKERS:
        raise BadInput(f"part {part!r}: the parts are {', '.join(MAKERS)}; add its metrics to bench/dayone_results.py")
    kept = [r for r in read_rows(out) if r["part"] != part]
    both = [*kept, *({"part": part, "git": REVISION, **r} for r in rows)]
    both.sort(key=lambda r: r["part"])
    found = metrics(both)
    write_results(out, found, both, seed=0)
    return found


def metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """All metrics that the rows allow."""
    parts = {part: [r for r in rows if r["part"] == part] for part in MAKERS}
    return {name: m for part, some in parts.items() if some for name, m in MAKERS[part](some).items()}
