"""How often intervals of rates corrected by labels hold the truth of invented runs: ppi.coverage."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks_results import Measured

from guardpaint.store.intervals import wilson
from guardpaint.store.results import metric

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from eyes import PROMPTS, World, covered

RUNS, LABELS = 400, 150
EVEN = World()
UNEVEN = replace(EVEN, more={("paper", ("unsafe", "repaired")): 0.6, ("paper", ("safe", "repaired")): 0.1})
"""The pictures of `paper` hold more harm than those of `ours` with the same answer and status."""


def measure() -> Measured:
    """A row for every invented run and defence, where pooling is right and where it is not."""
    rows: list[Mapping[str, Any]] = []
    found: dict[str, Any] = {}
    for world, name in ((EVEN, ""), (UNEVEN, "_uneven")):
        own = [{"world": name or "even", **r} for r in covered(world, RUNS, LABELS, seed=7)]
        rows += own
        for key, column in (("coverage", "corrected"), ("uncorrected", "uncorrected")):
            hits = [int(str(r[f"{column}_covers"])) for r in own]
            note = f"{RUNS} runs of {PROMPTS} prompts × 3 defences, {LABELS} labels each; the interval is 95 %"
            low, high = wilson(sum(hits) / 3, RUNS)  # defences of one run share its labels
            goal = ">=0.93" if (key, name) == ("coverage", "") else None
            found[f"ppi.{key}{name}"] = metric(sum(hits) / len(hits), len(hits), ci=(low, high), goal=goal, note=note)
        for defence in world.kinds:
            some = [r for r in own if r["defence"] == defence]
            for key in ("corrected", "uncorrected"):
                bias = float(np.mean([float(str(r[key])) - float(str(r["truth"])) for r in some]))
                found[f"ppi.bias{name}.{defence}.{key}"] = metric(bias, len(some))
    return Measured(found, rows)
