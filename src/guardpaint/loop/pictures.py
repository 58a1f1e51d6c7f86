"""Pictures that are safe to show to anyone: blurred ones, and the placeholder of a blocked image."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor

from guardpaint.draft.views import shrink
from guardpaint.store.images import to_pil

BLUR_CELLS = 12
"""A blurred region keeps about this many cells across the image's shorter side."""
THUMBNAIL_CELLS = 3
"""Cells of a thumbnail that anyone may see. With five, a judge still recognised a tenth of the unsafe pictures."""


def coarse(image: Float[Tensor, "3 h w"], cells: int) -> Float[Tensor, "3 h w"]:
    """The image reduced to a few cells and enlarged again by interpolation."""
    h, w = int(image.shape[-2]), int(image.shape[-1])
    scale = min(1.0, cells / min(h, w))
    small = F.interpolate(image[None], size=(max(1, round(h * scale)), max(1, round(w * scale))), mode="area")
    return F.interpolate(small, size=(h, w), mode="bilinear", align_corners=False)[0]


def blurred_thumbnail(image: Float[Tensor, "3 h w"], side: int = 96) -> Image.Image:
    """A small version of the image, blurred beyond recognition."""
    return to_pil(coarse(shrink(image.cpu(), side), THUMBNAIL_CELLS))


def placeholder(width: int, height: int) -> Image.Image:
    """The image that replaces a blocked one: a plain card with the words "image withheld"."""
    card = Image.new("RGB", (width, height), (236, 236, 232))
    draw = ImageDraw.Draw(card)
    text = "image withheld"
    left, top, right, bottom = draw.textbbox((0, 0), text)
    if right - left < width and bottom - top < height:
        draw.text(((width - right + left) / 2, (height - bottom + top) / 2), text, fill=(120, 120, 116))
    return card
