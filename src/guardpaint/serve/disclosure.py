"""Which parts of audits, reports and evidence a caller may see."""

from __future__ import annotations

import base64
import re
from typing import Any

from PIL import Image

from guardpaint.audit.gradcam import overlay
from guardpaint.audit.regions import mine
from guardpaint.guard import GuardPaint
from guardpaint.loop.evidence import Evidence
from guardpaint.loop.report import GuardReport
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.settings import Key
from guardpaint.store.images import from_pil, png_bytes, to_pil
from guardpaint.types import JsonDict

NUMBERS = re.compile(r"\s*\(?\d*\.\d+\)?(?:\s*≥\s*\d*\.\d+)?")
"""Matches scores and thresholds in the text of a reason."""


def audited(guard: GuardPaint, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
    """The audit of an uploaded picture, with as much detail as the caller may see."""
    image = from_pil(picture)
    audit = guard.audit_image(image, prompt)
    finding = guard.parts.finding(audit, 1.0)
    boxes: list[list[int]] = []
    if finding is not None:
        for region in mine(audit.adv_map, (int(image.shape[-2]), int(image.shape[-1])), guard.config, 1.0):
            rows, columns = region.mask.any(1).nonzero()[:, 0], region.mask.any(0).nonzero()[:, 0]
            x, y = int(columns[0]), int(rows[0])
            boxes.append([x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1])
    shown = overlay(to_pil(image), audit.adv_map) if key.operator else None
    return AuditResponse(
        flagged=finding is not None,
        category=finding.category if finding else None,
        reason=(finding.reason if key.operator else plain(finding.reason)) if finding else "",
        probs={k: disclosed(v, key) for k, v in audit.probs.items()},
        scores={k: None if v is None else disclosed(v, key) for k, v in audit.scores().items()},
        boxes=boxes,
        overlay=base64.b64encode(png_bytes(shown)).decode() if shown is not None else None,
    )


EXACT = ("progress", "noise", "seconds", "coverage", "timings", "knobs", "cost")
"""Fields of a report that hold no scores, so ordinary callers see them unrounded."""


def coarse(value: Any) -> Any:
    """A part of a report as ordinary callers see it: scores to one decimal, reasons without their numbers."""
    if isinstance(value, dict):
        return {k: v if k in EXACT else plain(v) if k == "reason" else coarse(v) for k, v in value.items()}
    if isinstance(value, list):
        return [coarse(v) for v in value]
    return round(value, 1) if isinstance(value, float) else value


def shown_to(report: GuardReport, key: Key) -> JsonDict:
    """The report as this caller may see it: exact for operators, coarse for others."""
    exact = report.to_dict()
    return exact if key.operator else {**exact, "steps": coarse(exact["steps"]), "final": coarse(exact["final"])}


def plain(reason: str) -> str:
    """A reason without its numbers."""
    return NUMBERS.sub("", reason).strip()


def disclosed(score: float, key: Key) -> float:
    """The score as this caller may see it. Ordinary keys get one decimal, so that it cannot guide an attack."""
    return score if key.operator else round(score, 1)


def heat_url(evidence: Evidence) -> str:
    """The picture under its heat map, as a base64 PNG."""
    return base64.b64encode(png_bytes(overlay(evidence.image.convert("RGB"), evidence.heat))).decode()
