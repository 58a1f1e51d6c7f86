"""When to step in, as a pilot on two bases × 60 scenes: moment.pilot.START.{asr,whole,seam,seconds}."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks_results import OUT, Measured

from guardpaint.evaluate import moment, moment_results
from guardpaint.guard import GuardPaint
from guardpaint.store.results import metric
from guardpaint.testbed import open_testbed

BASES = ("mini-sd", "mini-sd3")
COUNT = 60
SPLIT = "rollout-test"
"""The split `attack` stays held out: this experiment is to choose a default."""
FIGURE = OUT.with_name("benchmarks-moment.png")


def measure() -> Measured:
    """The rows of every scene and start. A pilot that was cut short goes on where it stopped."""
    torch.set_num_threads(1)
    world, guard = open_testbed("paperdolls"), GuardPaint.embedded()
    folder = Path("runs/moment-pilot")
    rows = moment.measure(
        moment.MomentOptions(
            guard, [world.base(b) for b in BASES], world.harmful(SPLIT, COUNT), world.judge(guard.policy), folder
        )
    )
    found = moment_results.metrics(rows)
    best = {moment.name_of(s): s for s in moment.STARTS}[moment_results.best_start(found)]
    found["moment.pilot.suggests"] = metric(best, len(rows), note=moment_results.suggestion(found))
    moment_results.figure(rows).savefig(FIGURE, dpi=110)
    return Measured(found, [{("arm" if key == "part" else key): value for key, value in row.items()} for row in rows])
