"""What auditors and approvers may answer. Anything else is an error, never `clean`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.errors import BadInput, NotFinite
from guardpaint.types import Approval, Approver, Audit, Auditor

SLACK, SUM_SLACK = 1e-4, 1e-2
"""How far rounding may carry a score out of [0, 1], and a sum of probabilities away from 1."""
PIXEL_SLACK = 0.02
"""How far rounding to half precision and resampling may carry a pixel out of [0, 1]."""


def checked_audits(audits: Sequence[Audit], auditor: Auditor, prompts: Sequence[str | None]) -> list[Audit]:
    """The audits of one pass, one for each prompt; raises if any cannot be relied on.

    Whoever takes the worst of several answers checks each of them first: the larger of a number and NaN is the number.
    """
    for audit, prompt in zip(audits, prompts, strict=True):
        check_audit(audit, auditor, prompt)
    return list(audits)


def check_pictures(images: Float[Tensor, "*b 3 h w"]) -> None:
    """Raise for pixels that are no numbers, or none in [0, 1].

    As bytes, NaN is black and everything above 1 white, and detectors like black and white pictures.
    """
    low, high = (float(v) for v in images.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NotFinite("a picture to be audited holds NaN or infinity")
    if low < -PIXEL_SLACK or high > 1 + PIXEL_SLACK:
        raise BadInput(f"a picture to be audited has pixels from {low:g} to {high:g}: they must lie in [0, 1]")


def checked_approval(approval: Approval, approver: Approver, who: str) -> Approval:
    """An approval that can be relied on."""
    check_probabilities(approval.probs, approver.categories, who)
    if approval.heat is not None and not torch.isfinite(approval.heat).all():
        raise NotFinite(f"the {who} answered with a heat map that holds NaN or infinity")
    return approval


def check_audit(audit: Audit, auditor: Auditor, prompt: str | None) -> None:
    """A score that is missing without being declared absent, not a number or no probability is an error."""
    check_probabilities(audit.probs, auditor.categories, "auditor")
    for name, value in audit.scores().items():
        if value is None and name not in auditor.absent and not (name == "F" and prompt is None):
            raise BadInput(f"the auditor gave no {name}, which it does not declare absent")
    numbers = [v for v in audit.scores().values() if v is not None]
    maps = (audit.adv_map, *audit.class_maps.values())
    if not all(math.isfinite(x) for x in numbers) or not all(torch.isfinite(m).all() for m in maps):
        raise NotFinite(f"the auditor answered with NaN or infinity: {audit.scores()}")
    refuse_outside(numbers, "auditor")


def check_probabilities(probs: Mapping[str, float], categories: tuple[str, ...], who: str) -> None:
    """Raise unless there is a probability for every category, and they sum to one."""
    if set(probs) != set(categories):
        raise BadInput(f"the {who} scored {sorted(probs)}, its categories are {sorted(categories)}")
    if not all(math.isfinite(p) for p in probs.values()):
        raise NotFinite(f"the {who} answered with NaN or infinity: {probs}")
    refuse_outside(probs.values(), who)
    total = sum(probs.values())
    if abs(total - 1) > SUM_SLACK:
        raise BadInput(f"the {who}'s probabilities sum to {total:.3f}, not to 1: {probs}")


def refuse_outside(numbers: Iterable[float], who: str) -> None:
    """Raise BadInput for a score that does not lie in [0, 1]."""
    outside = [x for x in numbers if not -SLACK <= x <= 1 + SLACK]
    if outside:
        raise BadInput(f"the {who} answered with {outside[0]}: scores and probabilities lie in [0, 1]")
