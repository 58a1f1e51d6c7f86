"""Tournaments as rows of pictures: the draft with the mask over it, the candidates, the winner framed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from guardpaint.bases import Base
from guardpaint.guard import GuardPaint
from guardpaint.loop.evidence import Evidence
from guardpaint.loop.pictures import coarse
from guardpaint.loop.report import GuardReport
from guardpaint.store.images import to_pil

SIDE, GAP, HEAD = 130, 6, 30
BLUR = 10
"""Cells of a blurred draft."""
FRAME, MASK = (34, 136, 51), (204, 51, 17)


@dataclass(frozen=True)
class Contest:
    """One tournament of a call: what it started from, and what it made."""

    title: str
    draft: Image.Image
    mask: np.ndarray
    """The mined region, at the size of the draft's own pixels."""
    candidates: Sequence[tuple[Image.Image, str, bool]]
    """Pictures with their scores; the last value marks the winner."""


def contests(guard: GuardPaint, base: Base, prompt: str, seed: int, clear: bool = False) -> list[Contest]:
    """Draw a prompt under a guard and return its tournaments; pictures are blurred unless `clear`."""
    started: list[Any] = []
    watching = guard.configured(retain_evidence=clear)
    watching.parts = replace(watching.parts, observer=started.append)
    twin = watching.to(base.pipe._execution_device).attach(base.pipe)
    out = twin([prompt], generator=[torch.Generator().manual_seed(seed)], **base.call)
    return list(paired(out.safety[0], started, clear))


def paired(report: GuardReport, started: Sequence[Any], clear: bool) -> Iterator[Contest]:
    """The tournaments of a report beside their beginnings, which are in the same order."""
    beginnings = iter(started)
    pictures: dict[tuple[int, str], list[Evidence]] = {}
    for e in report.evidence:
        pictures.setdefault((e.step, e.kind), []).append(e)
    for step in report.steps:
        for k, record in enumerate(step.tournaments):
            start = next(beginnings)
            own = {e.index: e.image for e in pictures.get((step.step, f"candidate {k}"), ())}
            painted = [
                (own[i], f"u = {c.utility:.3f}" if c.utility is not None else "", i == record.winner)
                for i, c in enumerate(record.candidates)
                if i in own
            ]
            draft = to_pil(start.control.cpu() if clear else coarse(start.control.cpu(), BLUR))
            title = f"{record.category}, step {step.step + 1} of {step.steps}, S = {record.control['S']:.2f}"
            yield Contest(title, draft, start.region.mask.cpu().numpy() > 0, painted)


def overlaid(draft: Image.Image, mask: np.ndarray) -> Image.Image:
    """The draft with the mask laid over it in red."""
    picture = draft.convert("RGB").resize((SIDE, SIDE))
    area = Image.fromarray(mask.astype(np.uint8) * 110).resize((SIDE, SIDE))
    return Image.composite(Image.new("RGB", (SIDE, SIDE), MASK), picture, area)


def sheet(rows: Sequence[Contest]) -> Image.Image | None:
    """One row for each tournament; None without any."""
    if not rows:
        return None
    columns = 1 + max(len(c.candidates) for c in rows)
    out = Image.new("RGB", (GAP + columns * (SIDE + GAP), len(rows) * (HEAD + SIDE + GAP)), "white")
    pen = ImageDraw.Draw(out)
    for y, contest in enumerate(rows):
        top = y * (HEAD + SIDE + GAP)
        pen.text((GAP, top + 2), contest.title, fill="black")
        out.paste(overlaid(contest.draft, contest.mask), (GAP, top + HEAD))
        for x, (picture, text, won) in enumerate(contest.candidates, start=1):
            left = GAP + x * (SIDE + GAP)
            pen.text((left, top + 15), f"{text}, wins" if won else text, fill="black")
            out.paste(picture.convert("RGB").resize((SIDE, SIDE)), (left, top + HEAD))
            if won:
                box = [left, top + HEAD, left + SIDE - 1, top + HEAD + SIDE - 1]
                pen.rectangle(box, outline=FRAME, width=5)
    return out
