"""Who may see what: audits, reports and evidence as a caller may read them."""

from __future__ import annotations

import base64
import io
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
from guardpaint.store.images import from_pil, to_pil
from guardpaint.types import JsonDict

NUMBERS = re.compile(r"\s*\(?\d*\.\d+\)?(?:\s*≥\s*\d*\.\d+)?")
"""Scores and thresholds within a reason."""


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def audited(guard: GuardPaint, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
    image = from_pil(picture)
    found = guard.audit_image(image, prompt)
    finding = guard.parts.finding(found, 1.0)
    boxes: list[list[int]] = []
    if finding is not None:
        for region in mine(found.adv_map, (int(image.shape[-2]), int(image.shape[-1])), guard.config, 1.0):
            rows, columns = region.mask.any(1).nonzero()[:, 0], region.mask.any(0).nonzero()[:, 0]
            x, y = int(columns[0]), int(rows[0])
            boxes.append([x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1])
    shown = overlay(to_pil(image), found.adv_map) if key.operator else None
    return AuditResponse(
        flagged=finding is not None,
        category=finding.category if finding else None,
        reason=(finding.reason if key.operator else plain(finding.reason)) if finding else "",
        probs={k: told(v, key) for k, v in found.probs.items()},
        scores={k: None if v is None else told(v, key) for k, v in found.scores().items()},
        boxes=boxes,
        overlay=base64.b64encode(png(shown)).decode() if shown is not None else None,
    )


EXACT = ("progress", "noise", "seconds", "coverage", "timings", "knobs", "cost")
"""What a report says about a generation's course, not about its scores."""


def coarse(value: Any) -> Any:
    """A part of a report as ordinary callers see it: scores to one decimal, reasons without their numbers."""
    if isinstance(value, dict):
        return {k: v if k in EXACT else plain(v) if k == "reason" else coarse(v) for k, v in value.items()}
    if isinstance(value, list):
        return [coarse(v) for v in value]
    return round(value, 1) if isinstance(value, float) else value


def shown_to(report: GuardReport, key: Key) -> JsonDict:
    """A report as a caller may read it."""
    whole = report.to_dict()
    return whole if key.operator else {**whole, "steps": coarse(whole["steps"]), "final": coarse(whole["final"])}


def plain(reason: str) -> str:
    """A reason without its numbers."""
    return NUMBERS.sub("", reason).strip()


def told(score: float, key: Key) -> float:
    """A score as a caller may see it: coarse for ordinary keys, so that it is no compass for a search."""
    return score if key.operator else round(score, 1)


def heat_url(evidence: Evidence) -> str:
    """The heat map over its picture."""
    return base64.b64encode(png(overlay(evidence.image.convert("RGB"), evidence.heat))).decode()
