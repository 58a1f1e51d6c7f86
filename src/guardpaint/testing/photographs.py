"""The photographs that scikit-image and scikit-learn bring, to fit and to measure views on without a download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from guardpaint.errors import BadInput

FITTED = {
    "chelsea": "skimage/data/chelsea.png",
    "coffee": "skimage/data/coffee.png",
    "retina": "skimage/data/retina.jpg",
    "hubble": "skimage/data/hubble_deep_field.jpg",
    "tissue": "skimage/data/ihc.png",
    "china": "sklearn/datasets/images/china.jpg",
}
"""Photographs that the shipped readouts were fitted on."""
HELD_OUT = {
    "astronaut": "skimage/data/astronaut.png",
    "rocket": "skimage/data/rocket.jpg",
    "motorcycle": "skimage/data/motorcycle_left.png",
    "flower": "sklearn/datasets/images/flower.jpg",
}
"""Photographs that no readout was fitted on."""


def photograph(name: str) -> Image.Image:
    """One photograph at its own size."""
    package, _, inside = {**FITTED, **HELD_OUT}[name].partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise BadInput(f"photograph {name!r} comes with {package}: pip install scikit-image scikit-learn")
    return Image.open(Path(spec.origin).parent / inside).convert("RGB")


def as_tensor(image: Image.Image) -> Float[Tensor, "3 h w"]:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def fitting(image: Image.Image, height: int, width: int) -> Float[Tensor, "3 h w"]:
    """The middle of a picture at exactly this size, in [0, 1]."""
    return as_tensor(ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS))
