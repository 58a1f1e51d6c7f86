"""Fit the readouts of a tiny decoder: what its early layers show, as a 3×3 linear map (`draft/readouts.py`).

guardpaint train readouts DECODER --out DIR
guardpaint train readouts --guard GUARD --family sd --pictures photos
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from guardpaint.draft.early_exit import SIDE, SYNTHETIC, fitted
from guardpaint.draft.natural import natural_pictures
from guardpaint.draft.readouts import Readouts, decoded, features, latents_of
from guardpaint.errors import BadInput
from guardpaint.testing.photographs import FITTED, HELD_OUT, fitting, photograph

SIDES = (512, 1024)
"""Scales at which every picture is shown: its shorter side in pixels."""
CROP = 512
"""Side of the middle square that is used at each scale."""
EXAMPLES = 16384


def crops(image: Image.Image) -> Iterator[Float[Tensor, "3 s s"]]:
    """The middle of a picture at every scale."""
    for side in SIDES:
        whole = fitting(image, side, side)
        start = (side - CROP) // 2
        yield whole[:, start : start + CROP, start : start + CROP]


def opened(path: Path) -> Image.Image:
    try:
        return Image.open(path).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise BadInput(f"{path}: not a picture ({error})") from error


def decibels(one: Tensor, other: Tensor) -> float:
    """Peak signal-to-noise ratio of two pictures in [0, 1]."""
    return float(-10 * torch.log10((one - other).square().mean().clamp_min(1e-12)))


@torch.no_grad()
def quality(tiny: Any, readouts: Readouts, images: Sequence[Image.Image]) -> dict[str, float]:
    """Mean PSNR of each exit against the whole decode, shrunk to the exit's size, on 512 px pictures."""
    sums = dict.fromkeys(readouts.maps, 0.0)
    for image in images:
        z = latents_of(tiny, fitting(image, CROP, CROP)[None].to(tiny.device))
        whole = decoded(tiny, z)
        for shrink, readout in readouts.maps.items():
            size = (CROP // shrink, CROP // shrink)
            small = torch.nn.functional.interpolate(whole, size=size, mode="bilinear", antialias=True)
            sums[shrink] += decibels(readout(features(tiny, z, shrink)), small)
    return {str(shrink): round(total / len(images), 2) for shrink, total in sums.items()}


def fit(tiny: Any, pictures: Path | None, command: str) -> Readouts:
    """Readouts fitted on the pictures of a folder, or on photographs of scikit-image and scikit-learn.

    Synthetic pictures are added, because a few photographs do not show everything. Every fifth picture of a folder is
    held out, to measure the readouts on.
    """
    if pictures is None:
        names, images = list(FITTED), [photograph(n) for n in FITTED]
        held_names, held = list(HELD_OUT), [photograph(n) for n in HELD_OUT]
    else:
        files = sorted(p for p in pictures.rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
        if len(files) < 5:
            raise BadInput(f"{pictures}: {len(files)} pictures (PNG, JPEG or WebP); at least 5 are needed")
        own = [p for k, p in enumerate(files) if k % 5 != 4]
        names, images = [p.name for p in own], [opened(p) for p in own]
        held_names, held = [p.name for p in files[4::5]], [opened(p) for p in files[4::5]]
    found = fitted(
        tiny,
        chain((crop for image in images for crop in crops(image)), natural_pictures(SYNTHETIC, SIDE)),
        "photographs" if pictures is None else "own",
        EXAMPLES,
        command=command,
        seed=0,
        fitted_on=[*names, f"{SYNTHETIC} synthetic"],
        measured_on=held_names,
    )
    card = {**found.card, "decibels": quality(tiny, found, held)}
    return Readouts(found.decoder, found.maps, card)
