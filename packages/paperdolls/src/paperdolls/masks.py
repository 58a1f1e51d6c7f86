"""Masks of figures, and the masks that an inpainter learns to fill.

Margins are in pixels of a picture of 64; in a larger picture they are larger by as much.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image, ImageFilter

from guardpaint.train.auditor_pictures import brush
from paperdolls.render import SIZE, render
from paperdolls.scene import Scene

SHAPES = ("figure", "figure_box", "box", "brush", "all")
WEIGHTS = (30, 30, 15, 20, 5)


def figure_mask(scene: Scene, main_only: bool = False, size: int = SIZE) -> Bool[np.ndarray, "s s"]:
    """Pixels that would look different without the figures (or the main one only), the splash and the blade."""
    rest = scene.figures[1:] if main_only else ()
    gone = replace(scene, kind="ordinary", figures=rest, splash=(), blade=None)
    return differs(render(scene, size).image, render(gone, size).image)


def touched(scene: Scene, size: int = SIZE) -> Bool[np.ndarray, "s s"]:
    """Pixels of figures, of splashes and blades, and of harmless things (flowers, plates, swords)."""
    plain = replace(scene, flowers=False, sauce=False, sword_on_wall=False)
    figures = figure_mask(scene, size=size)
    if plain == scene:
        return figures
    return figures | differs(render(scene, size).image, render(plain, size).image)


def differs(one: UInt8[np.ndarray, "h w 3"], other: UInt8[np.ndarray, "h w 3"]) -> Bool[np.ndarray, "h w"]:
    """Pixels at which two pictures visibly differ."""
    return np.abs(one.astype(np.int16) - other.astype(np.int16)).max(-1) > 24


def grown(mask: Bool[np.ndarray, "s s"], pixels: int) -> Bool[np.ndarray, "s s"]:
    """The mask widened by this margin on every side."""
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(image.filter(ImageFilter.MaxFilter(2 * pixels * unit(mask) + 1))) > 127


def unit(mask: Bool[np.ndarray, "s s"]) -> int:
    """How many pixels of this mask are one pixel of a picture of 64."""
    return max(1, len(mask) // SIZE)


def boxed(mask: Bool[np.ndarray, "s s"], margin: int) -> Bool[np.ndarray, "s s"]:
    """The bounding box of a mask, with a margin; the whole picture if the mask is empty."""
    out, margin = np.zeros_like(mask), margin * unit(mask)
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return ~out
    out[max(0, rows[0] - margin) : rows[-1] + margin + 1, max(0, columns[0] - margin) : columns[-1] + margin + 1] = True
    return out


def training_mask(scene: Scene, seed: int, size: int = SIZE) -> Bool[np.ndarray, "s s"]:
    """A mask to train the inpainter on, by seed: mostly a figure or its box, else a box, strokes or everything."""
    rng = random.Random(f"mask/{scene.jitter}/{seed}")
    shape = rng.choices(SHAPES, weights=WEIGHTS)[0]
    if shape in ("figure", "figure_box") and scene.figures:
        figure = figure_mask(scene, len(scene.figures) > 1 and rng.random() < 0.6, size)
        if figure.any():
            return grown(figure, rng.randint(1, 4)) if shape == "figure" else boxed(figure, rng.randint(0, 5))
    if shape == "all":
        return np.ones((size, size), bool)
    if shape == "brush":
        return brush(rng, size)
    w, h = rng.randint(12, 44), rng.randint(12, 52)
    x, y = rng.randint(0, SIZE - w), rng.randint(0, SIZE - h)
    out = np.zeros((size, size), bool)
    k = unit(out)
    out[k * y : k * (y + h), k * x : k * (x + w)] = True
    return out


def training_region(truth: Bool[np.ndarray, "h w"], seed: int) -> Bool[np.ndarray, "h w"]:
    """The unsafe area as a guard would mask it: widened, or its bounding box."""
    rng = random.Random(f"region/{seed}")
    return grown(truth, rng.randint(3, 7)) if rng.random() < 0.6 else boxed(truth, rng.randint(2, 6))
