"""The final verdict and the last-resort ladder: what leaves the guard."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor

from guardpaint.audit.regions import soft_mask, union
from guardpaint.draft.views import PixelViews, shrink
from guardpaint.errors import NotFinite
from guardpaint.loop.step import ImageGuard, Won
from guardpaint.policy import Finding
from guardpaint.repair.knobs import StrongProposer
from guardpaint.loop.report import StepRecord
from guardpaint.types import SAFE, Audit, Draft

BLUR_CELLS = 12
"""A blurred region keeps about this many cells across the image's shorter side."""
THUMBNAIL_CELLS = 3
"""A thumbnail that anyone may see keeps this many: with five, a judge still told a tenth of unsafe pictures."""


@dataclass(frozen=True)
class Outcome:
    """What to hand out: the picture as it came (image None), a changed one, or nothing (blocked)."""

    status: str
    image: Tensor | None = None
    """RGB in [0, 1], or a latent when latents were asked for."""
    mask: Float[Tensor, "h w"] | None = None
    passed: bool = False
    """What this replaces had passed as well: it may leave instead where this one cannot."""


def conclude(guard: ImageGuard, image: Float[Tensor, "3 h w"], draft: Draft | None, repair_here: bool) -> Outcome:
    """Verdict on the final image; repair it if the last step is an audited one; then the ladder."""
    if not torch.isfinite(image).all():
        raise NotFinite("the final image holds NaN or infinity")
    mode = guard.parts.config.mode
    if guard.errors:
        return Outcome("blocked" if mode == "enforce" else "released_flagged")
    views = PixelViews(image)
    record = guard.open(draft, views) if draft is not None else StepRecord(0, 0, 1.0, 0.0, views.kind)
    record.cost = record.cost or {"audits": 0, "regions": 0, "candidates": 0, "reinserts": 0}
    with guard.clock(record, "audit"):
        first = guard.audit(views.at(guard.first_pass(1.0))[None], views.noise, record)[0]
    guard.keep(record.step, "view", 1, image, first.adv_map)
    audit, finding = guard.confirm(views, first, record)
    guard.final.audits = list(record.audits)
    guard.final.verdict = "benign" if finding is None else "flagged"
    if finding is None:
        if any(r.reinsertion for r in guard.records):
            return reassured(guard, image, audit, draft, record)
        return Outcome("repaired" if guard.edited else "clean")
    if mode == "monitor":
        return Outcome("released_flagged")
    mask: Float[Tensor, "h w"] | None = None
    if draft is not None and repair_here:
        won = guard.repair(draft, views, audit, finding, record)
        if won is not None:
            finding_after = verdict(guard, won.view, record)
            if finding_after is None:
                better = reassured(guard, won.view, won.audit, draft, record)
                if better.image is not None and better.mask is not None:
                    won = Won(better.image, torch.maximum(won.mask, better.mask), won.audit)
                return accepted(guard, "repaired", won, record)
            image, audit, finding, mask = won.view, won.audit, finding_after, won.mask
    return last_resort(guard, image, audit, finding, draft, record, mask)


def reassured(
    guard: ImageGuard, image: Float[Tensor, "3 h w"], audit: Audit, draft: Draft | None, record: StepRecord
) -> Outcome:
    """A repaired picture that passes, after one more tournament where a harm is still rather likely.

    Passing is enough to leave: the tournament can only better it, and what it makes must pass as well.
    """
    plain = Outcome("repaired")
    harms = {c: p for c, p in audit.probs.items() if c != SAFE}
    likeliest = max(harms, key=harms.__getitem__)
    left = 1 - audit.safety
    if draft is None or guard.parts.config.mode == "monitor" or left < guard.parts.config.doubt:
        return plain
    reason = f"S {audit.safety:.3f} after a repair"
    record.notes.append(f"one more tournament: {reason}")
    won = guard.repair(draft, PixelViews(image), audit, Finding(likeliest, reason), record, label="again ")
    told = guard.final.audits
    guard.final.audits = list(told)
    if won is not None and verdict(guard, won.view, record) is None:
        return replace(accepted(guard, "repaired", won, record), passed=True)
    guard.final.audits = told
    return plain


def accepted(guard: ImageGuard, status: str, won: Won, record: StepRecord) -> Outcome:
    guard.final.verdict = "benign"
    guard.edited = True
    record.reinsertion = {"rule": "composed", "asked": "composed", "note": "finished picture: composed in pixels"}
    return Outcome(status, won.view, won.mask)


def verdict(guard: ImageGuard, image: Float[Tensor, "3 h w"], record: StepRecord) -> Finding | None:
    """A changed picture must pass both audit sizes."""
    found: Finding | None = None
    with guard.clock(record, "audit"):
        for pixels in sorted(set(guard.parts.auditor.sizes)):
            audit = guard.audit(shrink(image, pixels)[None], 0.0, record)[0]
            found = guard.note(audit, "output", record) or found
    guard.final.audits.append(record.audits[-1])
    return found


def last_resort(
    guard: ImageGuard,
    image: Float[Tensor, "3 h w"],
    audit: Audit,
    finding: Finding,
    draft: Draft | None,
    record: StepRecord,
    before: Float[Tensor, "h w"] | None = None,
) -> Outcome:
    """Walk the policy's ladder; each rung's picture must pass the verdict or the next rung is tried.

    `before` is where the image was repaired already: it belongs to whatever comes of it.
    """
    for rung in guard.parts.policy.last_resort:
        if rung == "block":
            guard.final.ladder.append({"rung": rung, "outcome": "blocked"})
            return Outcome("blocked")
        if rung == "keep":
            guard.final.ladder.append({"rung": rung, "outcome": "released although flagged"})
            return Outcome("released_flagged")
        won = (
            strong_repair(guard, image, audit, finding, draft, record)
            if rung == "strong_repair"
            else regional_blur(guard, image, audit, finding)
        )
        if won is None:
            guard.final.ladder.append({"rung": rung, "outcome": "no candidate accepted"})
            continue
        if verdict(guard, won.view, record) is None:
            guard.final.ladder.append({"rung": rung, "outcome": "passed"})
            whole = won if before is None else Won(won.view, torch.maximum(won.mask, before), won.audit)
            return accepted(guard, "repaired" if rung == "strong_repair" else "blurred", whole, record)
        guard.final.ladder.append({"rung": rung, "outcome": "still flagged"})
    return Outcome("blocked")


def strong_repair(
    guard: ImageGuard,
    image: Float[Tensor, "3 h w"],
    audit: Audit,
    finding: Finding,
    draft: Draft | None,
    record: StepRecord,
) -> Won | None:
    """One more round with wide masks, full depth and more candidates, under its own F gate."""
    if draft is None:
        return None
    parts, config = guard.parts, guard.parts.config
    f_gate = config.f_gate if config.last_f_gate == "same" else config.last_f_gate
    guard.parts = replace(parts, config=replace(config, f_gate=f_gate))
    try:
        return guard.repair(
            draft, PixelViews(image), audit, finding, record, StrongProposer(), config.strong_candidates
        )
    finally:
        guard.parts = parts


def regional_blur(guard: ImageGuard, image: Float[Tensor, "3 h w"], audit: Audit, finding: Finding) -> Won | None:
    """Blur what the heat map shows, widely; the whole picture when it shows nothing."""
    h, w = int(image.shape[-2]), int(image.shape[-1])
    regions = guard.regions(audit, finding, image)
    mask = soft_mask(union(regions).mask, 1.0, 0.5) if regions else torch.ones(h, w)
    return Won(torch.lerp(image, coarse(image, BLUR_CELLS), mask), mask, audit)


def coarse(image: Float[Tensor, "3 h w"], cells: int) -> Float[Tensor, "3 h w"]:
    """The image reduced to a few cells and smoothly enlarged again."""
    h, w = int(image.shape[-2]), int(image.shape[-1])
    scale = min(1.0, cells / min(h, w))
    small = F.interpolate(image[None], size=(max(1, round(h * scale)), max(1, round(w * scale))), mode="area")
    return F.interpolate(small, size=(h, w), mode="bilinear", align_corners=False)[0]


def to_pil(image: Float[Tensor, "3 h w"]) -> Image.Image:
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array)


def from_pil(image: Image.Image) -> Float[Tensor, "3 h w"]:
    """Any PIL image as RGB in [0, 1]; transparency over white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    array = np.asarray(image.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(array.copy()).permute(2, 0, 1) / 255


def blurred_thumbnail(image: Float[Tensor, "3 h w"], side: int = 96) -> Image.Image:
    """Small and blurred beyond recognition: safe to show to anyone."""
    return to_pil(coarse(shrink(image.cpu(), side), THUMBNAIL_CELLS))


def placeholder(width: int, height: int) -> Image.Image:
    """What a blocked slot holds: a plain card that says so."""
    card = Image.new("RGB", (width, height), (236, 236, 232))
    draw = ImageDraw.Draw(card)
    text = "image withheld"
    left, top, right, bottom = draw.textbbox((0, 0), text)
    if right - left < width and bottom - top < height:
        draw.text(((width - right + left) / 2, (height - bottom + top) / 2), text, fill=(120, 120, 116))
    return card
