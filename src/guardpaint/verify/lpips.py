"""LPIPS v0.1 as a map: the learned perceptual distance on VGG-16 or AlexNet, without torchvision."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import WEIGHTS, fingerprint, read_tensors, sha256_hex, write_atomic
from guardpaint.types import JsonDict

Own = TypeVar("Own", bound="Lpips")
SHIPPED = Path(__file__).parents[1] / "assets" / "lpips_alex.safetensors"
"""LPIPS-Alex in half precision; its licences are beside it."""


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


class Convolution(NamedTuple):
    """One convolution of a backbone, by its place in torchvision's `features`."""

    place: int
    channels: int
    size: int = 3
    stride: int = 1
    padding: int = 1


class Lpips(nn.Module):
    """Blocks of convolutions, each tapped at its end, with a learned weight per channel; weights by path."""

    name: ClassVar[str]
    kind: ClassVar[str]
    BLOCKS: ClassVar[tuple[tuple[Convolution, ...], ...]]
    POOL: ClassVar[int]
    """Side of the max pooling window, whose stride is 2."""
    POOLED: ClassVar[tuple[int, ...]]
    """Blocks that start with a pooling."""
    SMALLEST: ClassVar[int]
    """Side in pixels of the smallest picture that leaves something to tap; smaller ones are enlarged."""
    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.features, width = nn.ModuleDict(), 3
        for c in (c for block in self.BLOCKS for c in block):
            self.features[str(c.place)] = nn.Conv2d(width, c.channels, c.size, c.stride, c.padding)
            width = c.channels
        self.lins = nn.ParameterList(torch.zeros(1, block[-1].channels, 1, 1) for block in self.BLOCKS)
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188], device="cpu").view(1, 3, 1, 1))
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450], device="cpu").view(1, 3, 1, 1))

    @classmethod
    def from_file(cls: type[Own], path: str | Path) -> Own:
        """The backbone's convolutions as features.N.{weight,bias}, heads as lin0..4.weight."""
        state = read_tensors(Path(path))
        with torch.device("meta"):  # nothing is initialised, so the global RNG stays as it is
            model = cls()
        try:
            own = {
                name: state[re.sub(r"^lins\.(\d)$", r"lin\1.weight", name)].float().reshape(parameter.shape)
                for name, parameter in model.named_parameters()
            }
            model.load_state_dict(own, strict=False, assign=True)
        except (KeyError, RuntimeError) as error:
            raise BadCheckpoint(f"{path}: not {cls.__name__} weights ({error})") from error
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
        write_atomic(folder / WEIGHTS, save({k: v.contiguous().cpu() for k, v in state.items()}))

    @classmethod
    def from_pretrained(cls: type[Own], folder: Path) -> Own:
        return cls.from_file(folder / WEIGHTS)

    def taps(self, images: Float[Tensor, "b 3 h w"]) -> list[Tensor]:
        """The features at the end of every block."""
        side = min(images.shape[-2:])
        if side < self.SMALLEST:
            images = F.interpolate(images, scale_factor=self.SMALLEST / side, mode="bilinear", align_corners=False)
        x = (images * 2 - 1 - self.shift) / self.scale
        out = []
        for k, block in enumerate(self.BLOCKS):
            if k in self.POOLED:
                x = F.max_pool2d(x, self.POOL, stride=2)
            for c in block:
                x = F.relu(self.features[str(c.place)](x))
            out.append(x)
        return out

    @torch.no_grad()
    def distance(self, candidates: Float[Tensor, "n 3 h w"], control: Float[Tensor, "3 h w"]) -> Float[Tensor, "n h w"]:
        device = self.shift.device
        a, b = self.taps(candidates.to(device)), self.taps(control[None].to(device))
        size = (int(control.shape[-2]), int(control.shape[-1]))
        return spatial_distance(a, b, list(self.lins), size)


class LpipsVGG(Lpips):
    """The paper's seam metric: thirteen convolutions, 29 MB, weights by path."""

    name = kind = "lpips_vgg"
    BLOCKS = tuple(
        tuple(Convolution(i, channels) for i in indices)
        for indices, channels in (
            ((0, 2), 64), ((5, 7), 128), ((10, 12, 14), 256), ((17, 19, 21), 512), ((24, 26, 28), 512),
        )
    )  # fmt: skip
    POOL, POOLED, SMALLEST = 2, (1, 2, 3, 4), 16


class LpipsAlex(Lpips):
    """The small LPIPS: five convolutions, 5 MB, whose weights ship with the package."""

    name = kind = "lpips_alex"
    BLOCKS = (
        (Convolution(0, 64, 11, 4, 2),),
        (Convolution(3, 192, 5, 1, 2),),
        (Convolution(6, 384),),
        (Convolution(8, 256),),
        (Convolution(10, 256),),
    )
    POOL, POOLED, SMALLEST = 3, (1, 2), 32

    def __init__(self) -> None:
        super().__init__()
        self.shipped = False
        """Whether the weights are the package's own, which a guard's folder need not repeat."""

    @classmethod
    def load(cls) -> LpipsAlex:
        """The metric with the weights that ship with the package."""
        model = cls.from_file(SHIPPED)
        model.shipped = True
        return model

    def options(self) -> JsonDict:
        return {"weights": sha256_hex(SHIPPED.read_bytes())} if self.shipped else {}

    def save_pretrained(self, folder: Path) -> None:
        """The weights, unless they ship with the package: then the manifest has their hash."""
        if not self.shipped:
            super().save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder: Path, weights: str | None = None) -> LpipsAlex:
        """From a folder, or the shipped weights if their hash is given; raises BadCheckpoint if it is another."""
        if weights is None:
            return cls.from_file(folder / WEIGHTS)
        if (own := sha256_hex(SHIPPED.read_bytes())) != weights:
            raise BadCheckpoint(
                f"the guard was saved with LPIPS-Alex weights {str(weights)[:12]}…, this package ships {own[:12]}…; "
                "install the version it was saved with, or pass seam='lpips_alex'"
            )
        return cls.load()
