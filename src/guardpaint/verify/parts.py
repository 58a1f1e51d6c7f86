"""What a guard is made of, and one checked pass of its auditor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.config import GuardConfig
from guardpaint.errors import BadInput, NotFinite
from guardpaint.policy import Finding, Policy
from guardpaint.repair.ranker import Ranker
from guardpaint.types import Audit, Auditor, Proposer, Repairer, SeamMetric

SLACK, SUM_SLACK = 1e-4, 1e-2
"""How far rounding may carry a score out of [0, 1], and a sum of probabilities away from 1."""


@dataclass(frozen=True)
class Parts:
    """Everything a guard is made of."""

    auditor: Auditor
    repairer: Repairer
    proposer: Proposer
    seam: SeamMetric
    policy: Policy
    config: GuardConfig
    ranker: Ranker | None = None
    """Prunes candidates after a preview when `config.keep` asks for it."""
    observer: Callable[[Any], None] | None = None
    """Called with every `Tournament` before it is played; if it raises, the image fails closed."""

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        """One auditor pass. A score that is missing or not a number is an error, never a pass."""
        audits = self.auditor.audit(images, prompts, noise)
        for audit in audits:
            check_audit(audit, self.policy.names)
        return audits

    def finding(self, audit: Audit, progress: float) -> Finding | None:
        """The finding of the policy, with the thresholds calibrated for this progress; None if the audit is benign."""
        calibration = self.config.calibration
        return self.policy.finding(audit, None if calibration is None else calibration.at(progress).thresholds)

    def first_size(self, progress: float) -> int:
        """Size in pixels of the first audit of a step."""
        coarse, fine = self.auditor.sizes
        if self.config.resolution == "paper":
            return fine if progress >= 0.65 else coarse
        return fine if self.config.resolution == "fine" else coarse

    @property
    def fine_size(self) -> int:
        """Size in pixels of the audit that confirms a trigger and localises it."""
        return self.auditor.sizes[1]


def check_audit(audit: Audit, categories: tuple[str, ...]) -> None:
    """A score that is missing, not a number or no probability is an error, never a pass."""
    if set(audit.probs) != set(categories):
        raise BadInput(f"the auditor scored {sorted(audit.probs)}, the policy names {sorted(categories)}")
    numbers = [*audit.probs.values(), *(v for v in audit.scores().values() if v is not None)]
    if not all(math.isfinite(x) for x in numbers) or not torch.isfinite(audit.adv_map).all():
        raise NotFinite(f"the auditor answered with NaN or infinity: {audit.scores()}")
    outside = [x for x in numbers if not -SLACK <= x <= 1 + SLACK]
    if outside:
        raise BadInput(f"the auditor answered with {outside[0]}: scores and probabilities lie in [0, 1]")
    total = sum(audit.probs.values())
    if abs(total - 1) > SUM_SLACK:
        raise BadInput(f"the auditor's probabilities sum to {total:.3f}, not to 1: {audit.probs}")
