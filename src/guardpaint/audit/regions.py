"""Region mining and masks. Sizes are fractions of the image side; 512 px is the reference."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from scipy import ndimage
from torch import Tensor

from guardpaint.config import GuardConfig
from guardpaint.types import Region

REFERENCE = 512
MAX_DILATION = 32 / REFERENCE
"""Radius of dilation = 1, as a fraction of the shorter side."""
MAX_SIGMA = 10 / REFERENCE
"""Gaussian σ of feather = 1; the paper's σ = 5 is feather 0.5."""
TRUNCATE = 7 / 5
"""Kernel radius in σ: the paper's 15×15 at σ = 5."""


def heat_at(heat: Float[Tensor, "h w"], size: tuple[int, int]) -> Float[Tensor, "H W"]:
    """Heat map, bilinear to view size."""
    return F.interpolate(heat[None, None].float(), size=size, mode="bilinear", align_corners=False)[0, 0]


def largest(hot: Bool[np.ndarray, "h w"], count: int, least: float) -> tuple[Int[np.ndarray, "h w"], list[int]]:
    """Connected components of a map as labels from 1, and the labels of the `count` largest ones, largest first.

    Those below `least`, a share of the map, are left out.
    """
    labels, found = ndimage.label(hot, structure=np.ones((3, 3)))
    areas = np.bincount(labels.ravel(), minlength=found + 1)[1:]
    order = np.argsort(-areas, kind="stable")[:count]
    return labels, [int(k) + 1 for k in order if areas[k] >= least * hot.size]


def mine(heat: Float[Tensor, "h w"], size: tuple[int, int], config: GuardConfig, progress: float = 1.0) -> list[Region]:
    """Threshold → connected components → the K largest, tiny ones dropped. A flat map has no region."""
    view = heat_at(heat, size)
    if config.mask_threshold == "percentile":
        if float(heat.max() - heat.min()) <= 1e-6:
            return []
        hot = view >= torch.quantile(view.flatten()[:: max(1, view.numel() // 1_000_000)], config.percentile / 100)
    else:
        hot = view >= config.mask_level_at(progress)
    labels, kept = largest(hot.numpy(), config.regions, config.min_region)
    masks = [torch.from_numpy(labels == k) for k in kept]
    return [Region(m, float(m.float().mean()), float(view[m].max())) for m in masks]


def union(regions: list[Region]) -> Region:
    """All regions as one."""
    mask = torch.stack([r.mask for r in regions]).any(0)
    return Region(mask, float(mask.float().mean()), max(r.peak for r in regions))


def dilate(mask: Bool[Tensor, "h w"], radius: float) -> Float[Tensor, "h w"]:
    """Euclidean dilation by a real-valued radius; its last pixel is covered in proportion."""
    if radius <= 0 or bool(mask.all()) or not bool(mask.any()):
        return mask.float()
    distance = torch.from_numpy(ndimage.distance_transform_edt(~mask.numpy())).float()
    return (radius - distance + 1.0).clamp(0.0, 1.0)


def gaussian(mask: Float[Tensor, "h w"], sigma: float) -> Float[Tensor, "h w"]:
    """Separable truncated Gaussian; exact at sub-pixel σ, where a kernel of integer radius would do nothing."""
    if sigma <= 0:
        return mask
    radius = max(1, math.ceil(TRUNCATE * sigma))
    x = torch.arange(-radius, radius + 1, dtype=torch.float32)
    edges = torch.erf((x[:, None] + torch.tensor([-0.5, 0.5])) / (sigma * math.sqrt(2)))
    kernel = edges[:, 1] - edges[:, 0]
    kernel = kernel / kernel.sum()
    padded = F.pad(mask[None, None], (radius,) * 4, mode="replicate")
    rows = F.conv2d(padded, kernel.view(1, 1, 1, -1))
    return F.conv2d(rows, kernel.view(1, 1, -1, 1))[0, 0].clamp(0.0, 1.0)


def soft_mask(region: Bool[Tensor, "h w"], dilation: float, feather: float) -> Float[Tensor, "h w"]:
    """The mask of one candidate: region, dilated and feathered as its knobs say."""
    side = min(region.shape)
    return gaussian(dilate(region, dilation * MAX_DILATION * side), feather * MAX_SIGMA * side)


def latent_mask(mask: Float[Tensor, "h w"], size: tuple[int, int]) -> Float[Tensor, "u v"]:
    """The mask at latent size: area mean, so that 0 stays exactly 0 away from the region."""
    if tuple(mask.shape) == size:
        return mask
    mode = "area" if mask.shape[0] >= size[0] and mask.shape[1] >= size[1] else "bilinear"
    kwargs = {} if mode == "area" else {"align_corners": False}
    return F.interpolate(mask[None, None], size=size, mode=mode, **kwargs)[0, 0]
