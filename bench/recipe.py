"""Rehearse the paper's recipe, then take every stage's output away from the command that reads it.

python bench/recipe.py --out runs/rehearsal                       writes rehearsal.* into docs/results/recipe.json
python bench/recipe.py --out runs/rehearsal --results runs/recipe.json

For each output the consumer's command line is started as it is, without the engine's own check, so that only a command
that really opens the file can notice. Other scripts write the same file; their numbers and rows stay.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_results import OUT, write

from guardpaint.recipe import rehearsal
from guardpaint.recipe.engine import Engine, Interrupted
from guardpaint.recipe.ledger import DONE, INTERRUPTED
from guardpaint.recipe.rehearsal import Break, Rehearsal
from guardpaint.recipe.spec import Stage
from guardpaint.store.results import metric, require_clean

RECIPE = Path("recipes/paper.yaml")
LONGEST = 20
"""Minutes that a rehearsal may take on two cores."""


@dataclass(frozen=True)
class Cut:
    """A stage that got Ctrl-C while it worked, and its status then and after it was run again."""

    stage: str
    cut: str
    after: str
    message: str

    @property
    def well(self) -> bool:
        return self.cut == INTERRUPTED and self.after == DONE and "Go on with" in self.message


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
    notes = {
        "engine": "outputs taken away, noticed by the engine",
        "command": "outputs taken away, noticed by the command that reads them",
        "cut": "stages that got Ctrl-C while they worked and were done by the next run",
    }
    own = {kind: [r["detected"] for r in rows if r["kind"] == kind] for kind in notes}
    share = {k: metric(sum(v), len(v), goal=f">={len(v)}", note=notes[k]) for k, v in own.items() if v}
    left = ", ".join(found.not_rehearsed) or "none"
    return {
        "stages_run": metric(len(done), len(stages), goal=f">={len(stages)}", note=f"not rehearsed: {left}"),
        "minutes": metric(minutes, len(stages), goal=f"<={LONGEST}", note="one thread, one stage at a time"),
        "families_attached": metric(len(found.families), 4, goal=">=4", note=", ".join(found.families)),
        "overrides": metric(len(found.overrides), len(found.overrides)),
        **({"broken_chain_detected": share["command"]} if "command" in share else {}),
        **({"broken_chain_refused": share["engine"]} if "engine" in share else {}),
        **({"interrupted_and_resumed": share["cut"]} if "cut" in share else {}),
    }


def interrupted(engine: Engine, seconds: float) -> tuple[list[Cut], list[Stage]]:
    """Run all stages, each with one Ctrl-C after some seconds, and go on after it; stages that end before are left."""
    cuts, whole = [], []
    for stage in engine.chosen():
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            engine.one(stage)
            whole.append(stage)
        except Interrupted as error:
            record = engine.ledger.read(stage)
            status = "" if record is None else record.status
            engine.one(stage)
            after = engine.ledger.read(stage)
            cuts.append(Cut(stage.name, status, "" if after is None else after.status, str(error)))
        finally:
            timer.cancel()
    return cuts, whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/rehearsal"))
    parser.add_argument("--results", type=Path, default=OUT)
    parser.add_argument("--engine-only", action="store_true", help="leave out the command lines, which take minutes")
    parser.add_argument(
        "--interrupt", type=float, default=0, metavar="SECONDS", help="Ctrl-C in every stage, then go on"
    )
    options = parser.parse_args()
    require_clean(options.results)
    cuts: list[Cut] = []
    if options.interrupt:
        engine, _ = rehearsal.prepare(RECIPE, options.out)
        cuts, _ = interrupted(engine, options.interrupt)
    found = rehearsal.run(RECIPE, options.out, again=f"python bench/recipe.py --out {options.out}")
    rehearsal.write(found, options.out / "rehearsal.json")
    engine, _ = rehearsal.prepare(RECIPE, options.out)
    refused = rehearsal.break_chain(engine)
    reopened = [] if options.engine_only else rehearsal.break_chain(engine, through_engine=False)
    rows = [
        *rows_of(found, refused, reopened),
        *({"kind": "cut", "stage": c.stage, "detected": int(c.well)} for c in cuts),
    ]
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
