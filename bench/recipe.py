"""Rehearse the paper's recipe, then take every stage's output away from the command that reads it.

python bench/recipe.py --out runs/rehearsal                       writes rehearsal.* into docs/results/recipe.json
python bench/recipe.py --out runs/rehearsal --results runs/recipe.json

For each output the consumer's command line is started as it is, without the engine's own check, so that only a command
that really opens the file can notice. Other scripts write the same file; their numbers and rows stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe_results import OUT, write

from guardpaint.recipe import rehearsal
from guardpaint.recipe.ledger import DONE
from guardpaint.recipe.rehearsal import Break, Rehearsal
from guardpaint.store.results import metric, require_clean

RECIPE = Path("recipes/paper.yaml")
LONGEST = 20
"""Minutes that a rehearsal may take on two cores."""


def rows_of(found: Rehearsal, breaks: Sequence[Break], reopened: Sequence[Break]) -> list[dict[str, Any]]:
    """A row per stage, and one per output that was taken away, before the engine and before the command."""
    stages = [{"kind": "stage", **row} for row in found.stages]
    broken = [
        {"kind": kind, "stage": b.producer, "output": b.output, "consumer": b.consumer, "detected": int(b.detected)}
        for kind, some in (("engine", breaks), ("command", reopened))
        for b in some
    ]
    return [*stages, *broken]


def metrics_of(rows: Sequence[dict[str, Any]], found: Rehearsal) -> dict[str, Any]:
    """The numbers of a rehearsal."""
    stages = [r for r in rows if r["kind"] == "stage"]
    done = [r for r in stages if r["status"] == DONE]
    minutes = sum(float(r["seconds"]) for r in stages) / 60
    share = {}
    for kind in ("engine", "command"):
        own = [r["detected"] for r in rows if r["kind"] == kind]
        if own:
            share[kind] = metric(
                sum(own), len(own), goal=f">={len(own)}", note=f"outputs taken away, noticed by the {kind}"
            )
    left = ", ".join(found.not_rehearsed) or "none"
    return {
        "stages_run": metric(len(done), len(stages), goal=f">={len(stages)}", note=f"not rehearsed: {left}"),
        "minutes": metric(minutes, len(stages), goal=f"<={LONGEST}", note="one thread, one stage at a time"),
        "families_attached": metric(len(found.families), 4, goal=">=4", note=", ".join(found.families)),
        "overrides": metric(len(found.overrides), len(found.overrides)),
        **({"broken_chain_detected": share["command"]} if "command" in share else {}),
        **({"broken_chain_refused": share["engine"]} if "engine" in share else {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/rehearsal"))
    parser.add_argument("--results", type=Path, default=OUT)
    parser.add_argument("--engine-only", action="store_true", help="leave out the command lines, which take minutes")
    options = parser.parse_args()
    require_clean(options.results)
    found = rehearsal.run(RECIPE, options.out, again=f"python bench/recipe.py --out {options.out}")
    rehearsal.write(found, options.out / "rehearsal.json")
    engine, _ = rehearsal.prepare(RECIPE, options.out)
    refused = rehearsal.break_chain(engine)
    reopened = [] if options.engine_only else rehearsal.break_chain(engine, through_engine=False)
    rows = rows_of(found, refused, reopened)
    metrics = metrics_of(rows, found)
    write("rehearsal", metrics, rows, options.results)
    for b in (*refused, *reopened):
        if not b.detected:
            print(f"NOT detected: {b.output} of {b.producer}, read by {b.consumer} (exit {b.exit}): {b.message[-300:]}")
    for name, m in metrics.items():
        print(f"rehearsal.{name:24} {m['value']} (n={m['n']})")
    return int(found.families != ["sd", "sdxl", "sd3", "flux"] or any(not b.detected for b in (*refused, *reopened)))


if __name__ == "__main__":
    sys.exit(main())
