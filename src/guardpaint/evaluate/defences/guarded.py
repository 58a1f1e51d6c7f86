"""GuardPaint: with the paper's settings, with ours, and with parts switched off for ablations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from guardpaint.bases import Base
from guardpaint.draft.schedule import prediction_type
from guardpaint.evaluate.defences.base import Outcome
from guardpaint.evaluate.outside import PAINTED, packed
from guardpaint.guard import GuardPaint
from guardpaint.reinsert.apply import fitting

PAPER: dict[str, Any] = {
    "view": "stepped",
    "resolution": "paper",
    "view_decoder": "full",
    "candidates": 5,
    "audits": 2,
    "audit_start": 0.70,
    "heat_map": "adv",
    "mask_threshold": "percentile",
    "percentile": 85.0,
    "regions": 3,
    "delta": 0.01,
    "f_gate": "absolute",
    "p_gate": "on",
    "selection": "best",
    "blend_alpha": "progress_ramp",
    "calibration": None,
    "keep": 0,
    "doubt": 1.0,
    "last_f_gate": "same",
}
"""The settings of the published method. All are listed, so that new defaults of ours change none of them."""
PAPER_REINSERTION = {"sd": "null_text", "sdxl": "null_text", "sd3": "flow_ode", "flux": "flow_ode"}
"""The reinsertion rule that the paper chooses for each family."""


@dataclass(frozen=True)
class Guarded:
    guard: GuardPaint
    name: str = "ours"
    reinsertion: Mapping[str, str] | None = None
    """The reinsertion rule for each family; None means the guard's own."""

    def applies(self, base: Base) -> str:
        """The reason why the configured reinsertion rule would be replaced on this base; empty if it fits."""
        if self.reinsertion is not None or self.guard.config.reinsertion == "auto":
            return ""
        flow = prediction_type(base.pipe.scheduler) == "flow"
        return fitting(self.guard.config.reinsertion, flow, base.two_branches)[1]

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        guard = self.guard
        if self.reinsertion is not None:
            guard = guard.configured(reinsertion=self.reinsertion[base.family])
        twin = guard.to(base.pipe._execution_device).attach(base.pipe)
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        began = time.perf_counter()
        out = twin(list(prompts), generator=generators, **base.call)
        spent = (time.perf_counter() - began) / len(prompts)
        outcomes = []
        for image, report in zip(out.images, out.safety, strict=True):
            released = report.status in ("clean", "repaired", "blurred", "released_flagged")
            tournaments = [t for s in report.steps for t in s.tournaments]
            detail = {
                "triggered": report.triggered,
                "tournaments": len(tournaments),
                "accepted": sum(t.winner is not None for t in tournaments),
                "edited": report.status == "repaired",
                "ladder": " ".join(str(step["rung"]) for step in report.final.ladder),
                "error": report.errors[0] if report.errors else "",
            }
            if report.painted is not None:
                detail[PAINTED] = packed(report.painted)
            outcomes.append(Outcome(image if released else None, report.status, spent, detail))
        return outcomes


def variants(guard: GuardPaint) -> dict[str, Guarded]:
    """The guard with our settings, with the paper's, and with ours but without the last-resort ladder.

    The last two release a picture that is still flagged, so that their numbers show the effect of repairs alone.
    """
    releasing = replace(guard.policy, last_resort=("keep",))
    return {
        "ours": Guarded(guard),
        "paper": Guarded(guard.configured(policy=releasing, **PAPER), "paper", PAPER_REINSERTION),
        "ours_ladder_off": Guarded(guard.configured(policy=releasing), "ours_ladder_off"),
    }
