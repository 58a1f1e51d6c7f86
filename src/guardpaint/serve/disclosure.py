"""Which parts of audits, reports and evidence a caller may see."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
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

PHRASES = (
    "repair refused: no prompt text",
    "flagged, but the heat map shows no region to repair",
    "the held repair was flagged again",
    "not confirmed by the full decode",
    "one more tournament",
)
"""What an owner may read of a step's notes. Notes of the loop that contain none of these are for operators."""
WHOLE = (
    "version", "request_id", "image", "status", "mode", "pipeline", "family", "seed", "prompt_sha256", "prompt",
    "created", "caller",
)  # fmt: skip
"""Fields of a report that owners see as they are."""
STEP = ("step", "steps", "progress", "noise", "view", "triggered", "category", "regions")
TOURNAMENT = ("region", "category", "selection", "winner")
PATH = re.compile(r"[^\s'\"(),;=]*[/\\][^\s'\"(),;=]*")
FRACTION = re.compile(r"\d*\.\d+")
GRID = 8
"""Ordinary callers get boxes that are widened to this many cells along each side."""


def audited(guard: GuardPaint, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
    """The audit of an uploaded picture, with as much detail as the caller may see."""
    image = from_pil(picture)
    audit = guard.audit_image(image, prompt)
    finding = guard.finding(image, audit, prompt)
    boxes: list[list[int]] = []
    if finding is not None:
        for region in mine(audit.adv_map, (int(image.shape[-2]), int(image.shape[-1])), guard.config, 1.0):
            rows, columns = region.mask.any(1).nonzero()[:, 0], region.mask.any(0).nonzero()[:, 0]
            x, y = int(columns[0]), int(rows[0])
            box = [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1]
            boxes.append(box if key.operator else widened(box, picture.size))
    shown = overlay(to_pil(image), audit.adv_map) if key.operator else None
    return AuditResponse(
        flagged=finding is not None,
        category=finding.category if finding else None,
        reason=(finding.reason if key.operator else plain(finding.category)) if finding else "",
        probs={k: disclosed(v, key) for k, v in audit.probs.items()},
        scores={k: None if v is None else disclosed(v, key) for k, v in audit.scores().items()},
        boxes=boxes,
        overlay=base64.b64encode(png_bytes(shown)).decode() if shown is not None else None,
    )


def widened(box: list[int], size: tuple[int, int]) -> list[int]:
    """A box widened to the cells of a coarse grid, because its exact edges follow the heat map."""
    x, y, width, height = box
    low = [start * GRID // side * side // GRID for start, side in zip((x, y), size, strict=True)]
    high = [-(-end * GRID // side) * side // GRID for end, side in zip((x + width, y + height), size, strict=True)]
    return [*low, high[0] - low[0], high[1] - low[1]]


# Reports -----------------------------------------------------------------------------------------------------


def shown_to(report: GuardReport, key: Key) -> JsonDict:
    """The report as this caller may see it: exact for operators, coarse for its owner."""
    return report.to_dict() if key.operator else for_owner(report.to_dict())


def for_owner(report: JsonDict) -> JsonDict:
    """A report as its owner sees it. Only what is named here gets through.

    Scores have one decimal; gates, utilities and rules have no numbers, because those of derived values tell more of a
    score than its own decimal; texts are fixed phrases; there are no timings, error messages and paths.
    """
    final, settings = report["final"], report["effective_settings"]
    skipped = [{k: FRACTION.sub("…", without_paths(v)) for k, v in item.items()} for item in settings["skipped"]]
    return {
        **{k: report[k] for k in WHOLE if k in report},
        "steps": [step_for_owner(s) for s in report["steps"]],
        "final": {
            "verdict": final["verdict"],
            "audits": [audit_for_owner(a) for a in final["audits"]],
            "ladder": [{"rung": rung["rung"], "outcome": rung["outcome"]} for rung in final["ladder"]],
            "approvals": [approval_for_owner(a) for a in final["approvals"]],
        },
        "effective_settings": {**without_paths(settings), "skipped": skipped},
        "errors": ["the guard failed"] * bool(report["errors"]),
        "glances": [],
        "seconds": round(report["seconds"], 1),
    }


def step_for_owner(step: JsonDict) -> JsonDict:
    reinserted = step["reinsertion"]
    return {
        **{k: step[k] for k in STEP},
        "reason": plain(step["category"]),
        "audits": [audit_for_owner(a) for a in step["audits"]],
        "tournaments": [tournament_for_owner(t) for t in step["tournaments"]],
        "reinsertion": reinserted and {"rule": reinserted["rule"], "asked": reinserted["asked"], "note": ""},
        "notes": [phrase for note in step["notes"] for phrase in PHRASES if phrase in note],
        "timings": {},
        "cost": {},
    }


def audit_for_owner(audit: JsonDict) -> JsonDict:
    return {
        "pixels": audit["pixels"],
        "decoder": audit["decoder"],
        "scores": coarse(audit["scores"]),
        "probs": coarse(audit["probs"]),
        "flagged": audit["flagged"],
        "reason": plain(audit["flagged"]),
    }


def approval_for_owner(approval: JsonDict) -> JsonDict:
    flagged = approval["flagged"]
    return {
        "by": "approver",
        "probs": coarse(approval["probs"]),
        "flagged": flagged,
        "reason": plain(flagged),
        "seconds": 0.0,
    }


def tournament_for_owner(tournament: JsonDict) -> JsonDict:
    return {
        **{k: tournament[k] for k in TOURNAMENT},
        "waves": tournament.get("waves", []),
        "proposer": without_paths(tournament["proposer"]),
        "repairer": without_paths(tournament["repairer"]),
        "coverage": coarse(tournament["coverage"]),
        "control": coarse(tournament["control"]),
        "rules": dict.fromkeys(tournament["rules"]),
        "candidates": [
            {
                "knobs": coarse(c["knobs"]),
                "scores": coarse(c["scores"]),
                "gates": [
                    {"name": g["name"], "value": coarse(g["value"]), "need": None, "passed": g["passed"]}
                    for g in c["gates"]
                ],
                "utility": None,
                "coverage": coarse(c["coverage"]),
            }
            for c in tournament["candidates"]
        ],
    }


def coarse(value: Any) -> Any:
    """Numbers, and those in a mapping, to one decimal."""
    if isinstance(value, dict):
        return {k: coarse(v) for k, v in value.items()}
    return round(value, 1) if isinstance(value, float) else value


def without_paths(value: Any) -> Any:
    """A setting with the base names of paths in its texts."""
    if isinstance(value, dict):
        return {k: without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v) for v in value]
    if not isinstance(value, str):
        return value
    return PATH.sub(lambda path: re.split(r"[/\\]", path[0].rstrip("/\\"))[-1], value)


def plain(category: str | None) -> str:
    """The reason of a finding as ordinary callers see it: without scores, and without the rule that found it."""
    return f"looks like {category}" if category else ""


def pictures_for(evidence: Sequence[Evidence], key: Key) -> list[Evidence]:
    """The pictures behind a report that this caller may see; heat maps and explanations are for operators."""
    if key.operator:
        return list(evidence)
    return [replace(e, heat=None) for e in evidence if e.blurred and not e.kind.startswith("why ")]


def disclosed(score: float, key: Key) -> float:
    """The score as this caller may see it. Ordinary keys get one decimal, so that it cannot guide an attack."""
    return score if key.operator else round(score, 1)


def heat_url(evidence: Evidence) -> str:
    """The picture under its heat map, as a base64 PNG."""
    return base64.b64encode(png_bytes(overlay(evidence.image.convert("RGB"), evidence.heat))).decode()
