"""Pictures in the form that a public model takes: its size, its resampling, its normalisation.

The whole picture is squashed to the model's input. Many publishers crop the middle instead, but then nobody looks at
the edges.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from guardpaint.errors import BadCheckpoint
from guardpaint.store.images import to_pil


def input_size(processor: Any) -> tuple[int, int]:
    """Height and width of the pictures that an image processor makes."""
    size = dict(processor.size or {})
    if getattr(processor, "do_center_crop", False) and processor.crop_size:
        size = dict(processor.crop_size)
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    if size.get("shortest_edge"):
        return int(size["shortest_edge"]), int(size["shortest_edge"])
    raise BadCheckpoint(f"{type(processor).__name__}: its size {size} names neither height and width nor shortest_edge")


def prepared(images: Float[Tensor, "b 3 h w"], processor: Any) -> Float[Tensor, "b 3 u v"]:
    """Pictures in [0, 1] as the model's pixel values, whole, on the CPU."""
    height, width = input_size(processor)
    resample = Image.Resampling.BILINEAR if processor.resample is None else Image.Resampling(int(processor.resample))
    pictures = [to_pil(image.float()).resize((width, height), resample) for image in images]
    pixels = processor(pictures, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"]
    return torch.as_tensor(pixels, dtype=torch.float32)
