"""Draw the picture of the README: one repair, from the draft to the released picture.

python bench/hero.py docs/images/hero.png

The embedded guard repairs one picture of the paper-doll world. Left to right: the draft with the audited region
outlined, the candidates with their utilities (the winner framed), and the released picture. Unsafe ones are blurred.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from guardpaint import GuardPaint
from guardpaint.bases import load_base
from guardpaint.loop.pictures import coarse
from guardpaint.store.images import to_pil

BASE, PROMPT, SEED = "mini-sd", "a person without clothes on the beach", 2
SIDE, GAP, HEAD = 176, 12, 46
INK, PAPER, GOLD, RED = (34, 34, 34), (255, 255, 255), (214, 158, 0), (196, 40, 40)
BLUR = 10


def tile(image: Image.Image, frame: tuple[int, int, int] | None = None) -> Image.Image:
    big = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if frame is not None:
        ImageDraw.Draw(big).rectangle([0, 0, SIDE - 1, SIDE - 1], outline=frame, width=5)
    return big


def outlined(image: Image.Image, mask: np.ndarray) -> Image.Image:
    """The enlarged picture with the border of the region drawn in red."""
    big = tile(image)
    area = np.asarray(Image.fromarray(mask.astype(np.uint8) * 255).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) > 127
    inner = area.copy()
    for axis, step in ((0, 2), (0, -2), (1, 2), (1, -2)):
        inner &= np.roll(area, step, axis)
    pixels = np.asarray(big).copy()
    pixels[area & ~inner] = RED
    return Image.fromarray(pixels)


def blurred(image: torch.Tensor) -> Image.Image:
    return to_pil(coarse(image, BLUR))


def drawn() -> tuple[list[Any], Any]:
    """Generate one picture; returns the tournaments as they started, and the output of the pipeline."""
    started: list[Any] = []
    guard = GuardPaint.embedded(retain_evidence=True)
    guard.parts = replace(guard.parts, observer=started.append)
    base = load_base(BASE)
    out = guard.attach(base.pipe)(PROMPT, generator=torch.Generator().manual_seed(SEED), **base.call)
    return started, out


def main(path: Path) -> None:
    torch.set_num_threads(1)
    started, out = drawn()
    report = out.safety[0]
    step = next(s for s in report.steps if any(t.winner is not None for t in s.tournaments))
    number, played = next((k, t) for k, t in enumerate(step.tournaments) if t.winner is not None)
    before = sum(len(s.tournaments) for s in report.steps[: report.steps.index(step)])
    start = started[before + number]
    candidates = {e.index: e.image for e in report.evidence if (e.step, e.kind) == (step.step, f"candidate {number}")}
    cells = [
        (
            "draft, audited region",
            f"S = {played.control['S']:.2f}",
            outlined(blurred(start.control), start.region.mask.numpy()),
        )
    ]
    for i, c in enumerate(played.candidates):
        won = i == played.winner
        safe = c.scores["S"] > 0.6
        picture = (
            candidates[i]
            if safe
            else blurred(torch.from_numpy(np.asarray(candidates[i]).copy()).permute(2, 0, 1) / 255)
        )
        name = f"candidate {i + 1}" + (", wins" if won else "")
        cells.append((name, f"S = {c.scores['S']:.2f}, u = {c.utility:.2f}", tile(picture, GOLD if won else None)))
    cells.append(("released", f"status: {report.status}", tile(out.images[0])))
    sheet = Image.new("RGB", (GAP + len(cells) * (SIDE + GAP), HEAD + SIDE + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(15), ImageFont.load_default(13)
    for k, (title, line, picture) in enumerate(cells):
        x = GAP + k * (SIDE + GAP)
        draw.text((x, 6), title, fill=INK, font=font)
        draw.text((x, 26), line, fill=(110, 110, 110), font=small)
        sheet.paste(picture, (x, HEAD))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)
    print(f"{path}: {report.status}, {len(played.candidates)} candidates")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
