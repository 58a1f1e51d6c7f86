"""Grad-CAM on the auditor's visual features, and the overlays people look at."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor

from guardpaint.audit.model import AuditorScorer, Text
from guardpaint.errors import BadInput


def grad_cam(
    auditor: AuditorScorer, image: Float[Tensor, "3 h w"], category: str, prompt: str = "", noise: float = 0.0
) -> Float[Tensor, "h w"]:
    """ReLU(Σ_k α_k F_k), α the pooled gradient of the class logit; scaled to [0, 1], image size."""
    if category not in auditor.categories:
        raise BadInput(f"category {category!r}: the auditor knows {', '.join(auditor.categories)}")
    device = auditor.device
    with torch.inference_mode(False), torch.enable_grad():
        visual = auditor.features(image[None].to(device).clone()).detach().requires_grad_(True)
        text = Text(*auditor.text(auditor.token_ids([prompt]).to(device)))
        logits = auditor.heads(visual, text, torch.tensor([noise], device=device)).class_logits
        (gradient,) = torch.autograd.grad(logits[0, auditor.categories.index(category)], visual)
    cam = F.relu((gradient.mean((2, 3), keepdim=True) * visual).sum(1, keepdim=True)).detach()
    cam = F.interpolate(cam, size=image.shape[-2:], mode="bilinear", align_corners=False)[0, 0].cpu()
    return cam / cam.max().clamp_min(1e-12)


def overlay(image: Image.Image, heat: Float[Tensor, "h w"], level: float = 0.5) -> Image.Image:
    """The image under a warm heat map, with a contour line at `level`."""
    values = F.interpolate(
        heat[None, None].float(), size=(image.height, image.width), mode="bilinear", align_corners=False
    )[0, 0].numpy()
    base = np.asarray(image.convert("RGB"), dtype=np.float32)
    warm = np.stack([255 * np.ones_like(values), 200 * (1 - values), 40 * (1 - values)], axis=-1)
    alpha = (0.65 * values)[..., None]
    mixed = Image.fromarray((base * (1 - alpha) + warm * alpha).clip(0, 255).astype(np.uint8))
    inside = values >= level
    edge = np.zeros_like(inside)
    edge[:, 1:] |= inside[:, 1:] != inside[:, :-1]
    edge[1:, :] |= inside[1:, :] != inside[:-1, :]
    draw = ImageDraw.Draw(mixed)
    draw.point([(int(x), int(y)) for y, x in zip(*np.nonzero(edge), strict=True)], fill=(255, 255, 255))
    return mixed
