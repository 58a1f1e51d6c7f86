"""docs/results/recipe.json, which several scripts write: each replaces its own part and keeps those of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from guardpaint.store.checkpoint import read_json
from guardpaint.store.results import REVISION, read_rows, write_results

OUT = Path("docs/results/recipe.json")


def write(part: str, found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Replace the metrics `PART.…` and the rows of one part. Rows name their own revision."""
    before = read_json(out)["metrics"] if out.exists() else {}
    kept = {name: value for name, value in before.items() if not name.startswith(f"{part}.")}
    both = [r for r in read_rows(out) if r["part"] != part]
    both += [{"part": part, "git": REVISION, **r} for r in rows]
    both.sort(key=lambda r: str(r["part"]))
    metrics = {**kept, **{f"{part}.{name}": value for name, value in found.items()}}
    write_results(out, dict(sorted(metrics.items())), both, seed=0)
