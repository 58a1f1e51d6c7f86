"""How many of the published layouts of prompt files are read right: layouts.right, layouts.total."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks_results import Measured

from guardpaint.store.results import metric

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from layouts import LAYOUTS, faults


def measure() -> Measured:
    """One row for each layout of tests/data/layouts.json, with what was read wrong."""
    rows = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            wrong = faults(layout, Path(folder) / "files")
        rows.append(
            {"layout": layout["file"], "kind": layout["kind"], "right": int(not wrong), "faults": "; ".join(wrong)}
        )
    right, total = sum(int(r["right"]) for r in rows), len(rows)
    note = "files of invented rows in the published layouts; each at its published size too, and without its name"
    return Measured(
        {
            "layouts.right": metric(right, total, goal=f">={total}", note=note),
            "layouts.total": metric(total, total),
        },
        rows,
    )
