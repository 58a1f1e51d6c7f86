"""Seam quality Q: LPIPS restricted to a ring around the mask's boundary."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy import ndimage
from torch import Tensor, nn

from guardpaint.audit.model import AuditorScorer
from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import WEIGHTS, fingerprint, read_tensors, sha256_hex, write_atomic
from guardpaint.types import JsonDict, SeamMetric

KAPPA = 5.0
RING = 8 / 512
"""r_ring as a fraction of the shorter side."""


def ring(mask: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
    """Dilate(m, r) − erode(m, r) with the paper's square element; at least one pixel wide."""
    hard = mask.numpy() > 0.5
    r = max(1, round(RING * min(mask.shape)))
    size = 2 * r + 1
    grown = ndimage.grey_dilation(hard.astype("uint8"), size=(size, size), mode="nearest")
    shrunk = ndimage.grey_erosion(hard.astype("uint8"), size=(size, size), mode="nearest")
    return torch.from_numpy(grown - shrunk).float()


def seam_quality(
    metric: SeamMetric,
    candidates: Float[Tensor, "n 3 h w"],
    control: Float[Tensor, "3 h w"],
    masks: Float[Tensor, "n h w"],
) -> Float[Tensor, " n"]:
    """Q = exp(−5 · mean ring LPIPS(C_i, C_0)); 1 where a mask has no boundary."""
    distance = metric.distance(candidates, control).cpu()
    rings = torch.stack([ring(m) for m in masks])
    area = rings.sum((1, 2))
    mean = (distance * rings).sum((1, 2)) / area.clamp_min(1.0)
    return torch.exp(-KAPPA * mean)


def unit(features: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Unit length over channels."""
    return features / (features.norm(dim=1, keepdim=True) + 1e-10)


def spatial_distance(
    a: list[Tensor], b: list[Tensor], weights: list[Tensor | None], size: tuple[int, int]
) -> Float[Tensor, "n h w"]:
    """LPIPS formula: Σ over layers of the weighted squared difference of unit features, at image size."""
    total = torch.zeros(len(a[0]), 1, *size, device=a[0].device)
    for x, y, w in zip(a, b, weights, strict=True):
        squared = (unit(x) - unit(y)) ** 2
        layer = squared.sum(1, keepdim=True) if w is None else F.conv2d(squared, w)
        total += F.interpolate(layer, size=size, mode="bilinear", align_corners=False)
    return total[:, 0]


class LpipsVGG(nn.Module):
    """LPIPS v0.1 on VGG-16: thirteen convolutions, five taps, learned heads; weights by path."""

    name = "lpips_vgg"
    kind: ClassVar[str] = "lpips_vgg"
    PLAN = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
    CHANNELS = (64, 128, 256, 512, 512)
    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features, width = nn.ModuleDict(), 3
        for indices, channels in zip(self.PLAN, self.CHANNELS, strict=True):
            for index in indices:
                self.features[str(index)] = nn.Conv2d(width, channels, 3, padding=1)
                width = channels
        self.lins = nn.ParameterList(torch.zeros(1, c, 1, 1) for c in self.CHANNELS)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1))

    @classmethod
    def from_file(cls, path: str | Path) -> LpipsVGG:
        """VGG convolutions as features.N.{weight,bias}, heads as lin0..4.weight."""
        state, model = read_tensors(Path(path)), cls()
        try:
            for index, conv in model.features.items():
                assert isinstance(conv, nn.Conv2d) and conv.bias is not None
                conv.weight.data = state[f"features.{index}.weight"].float().reshape(conv.weight.shape)
                conv.bias.data = state[f"features.{index}.bias"].float().reshape(conv.bias.shape)
            for i in range(5):
                model.lins[i].data = state[f"lin{i}.weight"].float().reshape(model.lins[i].shape)
        except (KeyError, RuntimeError) as error:
            raise BadCheckpoint(f"{path}: not LPIPS-VGG weights ({error})") from error
        return model.eval().requires_grad_(False)

    def options(self) -> JsonDict:
        return {}

    def digest(self) -> str:
        return fingerprint(self)

    def save_pretrained(self, folder: Path) -> None:
        """The weights under the names that `from_file` reads."""
        from safetensors.torch import save

        state = {f"lin{i}.weight": head.detach() for i, head in enumerate(self.lins)}
        for index, conv in self.features.items():
            assert isinstance(conv, nn.Conv2d) and conv.bias is not None
            state |= {f"features.{index}.weight": conv.weight.detach(), f"features.{index}.bias": conv.bias.detach()}
        write_atomic(folder / WEIGHTS, save({k: v.contiguous() for k, v in state.items()}))

    @classmethod
    def from_pretrained(cls, folder: Path) -> LpipsVGG:
        return cls.from_file(folder / WEIGHTS)

    def taps(self, images: Float[Tensor, "b 3 h w"]) -> list[Tensor]:
        x = (images * 2 - 1 - self.shift) / self.scale
        out = []
        for k, indices in enumerate(self.PLAN):
            if k:
                x = F.max_pool2d(x, 2)
            for index in indices:
                x = F.relu(self.features[str(index)](x))
            out.append(x)
        return out

    @torch.no_grad()
    def distance(self, candidates: Float[Tensor, "n 3 h w"], control: Float[Tensor, "3 h w"]) -> Float[Tensor, "n h w"]:
        device = self.shift.device
        a, b = self.taps(candidates.to(device)), self.taps(control[None].to(device))
        size = (int(control.shape[-2]), int(control.shape[-1]))
        return spatial_distance(a, b, list(self.lins), size)


class BackboneSeam:
    """The LPIPS formula on unit features of the auditor's own backbone: no further weights."""

    name = "auditor_backbone"

    def __init__(self, auditor: AuditorScorer) -> None:
        self.auditor = auditor

    @torch.no_grad()
    def distance(self, candidates: Float[Tensor, "n 3 h w"], control: Float[Tensor, "3 h w"]) -> Float[Tensor, "n h w"]:
        device = self.auditor.device
        a, b = self.auditor.stages(candidates.to(device)), self.auditor.stages(control[None].to(device))
        size = (int(control.shape[-2]), int(control.shape[-1]))
        total = spatial_distance(a, b, [None] * len(a), size)
        return total / (2 * len(a))


class PixelSeam:
    """Plain colour distance; for detectors that have no features."""

    name = "pixels"
    kind: ClassVar[str] = "pixels"

    def options(self) -> JsonDict:
        return {}

    def save_pretrained(self, folder: Path) -> None:
        """Nothing: it has no files."""

    @classmethod
    def from_pretrained(cls, folder: Path) -> PixelSeam:
        return cls()

    def digest(self) -> str:
        return sha256_hex(self.kind)

    def distance(self, candidates: Float[Tensor, "n 3 h w"], control: Float[Tensor, "3 h w"]) -> Float[Tensor, "n h w"]:
        return ((candidates - control) ** 2).mean(1)
