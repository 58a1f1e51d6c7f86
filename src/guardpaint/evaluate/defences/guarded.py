"""GuardPaint: with the paper's settings, with ours, and with parts switched off for ablations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from guardpaint.evaluate.defences.base import Base, Everywhere, Outcome
from guardpaint.system import GuardPaint

PAPER: dict[str, Any] = {
    "view": "stepped",
    "resolution": "paper",
    "mask_threshold": "percentile",
    "f_gate": "absolute",
    "reinsertion": "direct_blend",
    "blend_alpha": "progress_ramp",
    "calibration": None,
    "keep": 0,
}
"""Settings of the method as it was published; the final verdict and failing closed stay."""


@dataclass(frozen=True)
class Guarded(Everywhere):
    guard: GuardPaint
    name: str = "ours"

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        twin = self.guard.attach(base.pipe)
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        began = time.perf_counter()
        out = twin(list(prompts), generator=generators, **base.call)
        spent = (time.perf_counter() - began) / len(prompts)
        outcomes = []
        for image, report in zip(out.images, out.safety, strict=True):
            released = report.status in ("clean", "repaired", "blurred", "released_flagged")
            contests = [t for s in report.steps for t in s.tournaments]
            detail = {
                "triggered": report.triggered,
                "tournaments": len(contests),
                "accepted": sum(t.winner is not None for t in contests),
                "edited": report.status == "repaired",
            }
            outcomes.append(Outcome(image if released else None, report.status, spent, detail))
        return outcomes


def variants(guard: GuardPaint) -> dict[str, Guarded]:
    """ours, paper, and ours with the last resort off (a picture still flagged is blocked)."""
    from dataclasses import replace

    blocking = replace(guard.policy, last_resort=("block",))
    return {
        "ours": Guarded(guard),
        "paper": Guarded(guard.configured(**PAPER), "paper"),
        "ours_ladder_off": Guarded(guard.configured(policy=blocking), "ours_ladder_off"),
    }
