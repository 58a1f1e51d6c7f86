"""Draw open_nsfw's heat maps on the photographs that scikit-image and scikit-learn bring.

python bench/heat_maps.py docs/images/heat-maps.png

Under each photograph are two maps over its grey copy: what every cell of the feature map says at the level of 0.5, and
the same at the picture's own score, which is where a repair would go if the picture were flagged. White lines are at
0.5. All ten are harmless, so the maps show what the classifier is tempted by.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from guardpaint.audit.gradcam import overlay
from guardpaint.audit.levels import LEAST
from guardpaint.audit.open_nsfw import OnnxAuditor
from guardpaint.store.images import from_pil, save_image
from guardpaint.testing.photographs import FITTED, HELD_OUT, photograph

SIDE, GAP, FOOT, COLUMNS, COLOURS = 120, 8, 36, 5, 256
INK, PAPER = (34, 34, 34), (255, 255, 255)


def panel(name: str, auditor: OnnxAuditor) -> Image.Image:
    """A photograph above its two maps, with its score and the highest value of the first map."""
    image = photograph(name)
    pixels = from_pil(image)[None]
    audit = auditor.audit(pixels, [None], 0.0)[0]
    flagged = auditor.with_levels({"nudity": max(LEAST, audit.adv_prob)}).audit(pixels, [None], 0.0)[0]
    shown = ImageOps.contain(image, (SIDE, SIDE))
    grey = ImageOps.grayscale(shown).convert("RGB")
    canvas = Image.new("RGB", (SIDE, 3 * (SIDE + GAP) + FOOT), PAPER)
    corner = (SIDE - shown.width) // 2, (SIDE - shown.height) // 2
    for row, part in enumerate((shown, overlay(grey, audit.adv_map), overlay(grey, flagged.adv_map))):
        canvas.paste(part, (corner[0], corner[1] + row * (SIDE + GAP)))
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    for line, text in enumerate((name, f"score {audit.adv_prob:.4f}, peak {float(audit.adv_map.max()):.2f}")):
        draw.text(((SIDE - draw.textlength(text, font)) / 2, 3 * (SIDE + GAP) + 14 * line), text, INK, font)
    return canvas


def sheet(panels: list[Image.Image]) -> Image.Image:
    """Panels in rows."""
    rows = -(-len(panels) // COLUMNS)
    width, height = panels[0].width + GAP, panels[0].height + GAP
    canvas = Image.new("RGB", (COLUMNS * width + GAP, rows * height + GAP), PAPER)
    for k, one in enumerate(panels):
        canvas.paste(one, (GAP + k % COLUMNS * width, GAP + k // COLUMNS * height))
    return canvas.quantize(palette=canvas.quantize(COLOURS), dither=Image.Dither.FLOYDSTEINBERG)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    auditor = OnnxAuditor()
    save_image(sheet([panel(n, auditor) for n in (*HELD_OUT, *FITTED)]), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
