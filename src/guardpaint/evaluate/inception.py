"""The Inception network of FID and KID: 2,048 features of a picture, with the weights that everybody reports FID with.

The file is pt_inception-2015-12-05-6726825d.pth (github.com/mseitzer/pytorch-fid), which torch-fidelity also
distributes; a safetensors file with the same names is read too. Resizing is that of torchmetrics: bilinear, smoothed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from guardpaint.draft.loading import on_machine
from guardpaint.errors import BadInput, GuardPaintError
from guardpaint.store.checkpoint import load_strict, read_tensors

SIZE = 299
CLASSES = 1008
WEIGHTS = "pt_inception-2015-12-05-6726825d.pth"


class Conv(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, into: int, out: int, kernel: Any, stride: int = 1, padding: Any = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def mean_pool(x: Tensor) -> Tensor:
    """Mean over 3 × 3 cells, of which those beyond the edge do not count: where FID's network differs from others."""
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


class BlockA(nn.Module):
    def __init__(self, into: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(into, 64, 1)
        self.branch5x5_1, self.branch5x5_2 = Conv(into, 48, 1), Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(into, 64, 1), Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, padding=1)
        self.branch_pool = Conv(into, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(mean_pool(x))], 1)


class BlockB(nn.Module):
    def __init__(self, into: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(into, 384, 3, stride=2)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(into, 64, 1), Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), three, F.max_pool2d(x, 3, 2)], 1)


class BlockC(nn.Module):
    def __init__(self, into: int, width: int) -> None:
        super().__init__()
        row: dict[str, Any] = {"kernel": (1, 7), "padding": (0, 3)}
        column: dict[str, Any] = {"kernel": (7, 1), "padding": (3, 0)}
        self.branch1x1 = Conv(into, 192, 1)
        self.branch7x7_1, self.branch7x7_2 = Conv(into, width, 1), Conv(width, width, **row)
        self.branch7x7_3 = Conv(width, 192, **column)
        self.branch7x7dbl_1, self.branch7x7dbl_2 = Conv(into, width, 1), Conv(width, width, **column)
        self.branch7x7dbl_3, self.branch7x7dbl_4 = Conv(width, width, **row), Conv(width, width, **column)
        self.branch7x7dbl_5 = Conv(width, 192, **row)
        self.branch_pool = Conv(into, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        once = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([self.branch1x1(x), once, twice, self.branch_pool(mean_pool(x))], 1)


class BlockD(nn.Module):
    def __init__(self, into: int) -> None:
        super().__init__()
        self.branch3x3_1, self.branch3x3_2 = Conv(into, 192, 1), Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1, self.branch7x7x3_2 = Conv(into, 192, 1), Conv(192, 192, (1, 7), padding=(0, 3))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1), padding=(3, 0))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), seven, F.max_pool2d(x, 3, 2)], 1)


class BlockE(nn.Module):
    """`last` takes the largest instead of the mean of neighbours, a slip of the original that FID keeps."""

    def __init__(self, into: int, last: bool) -> None:
        super().__init__()
        self.last = last
        row: dict[str, Any] = {"kernel": (1, 3), "padding": (0, 1)}
        column: dict[str, Any] = {"kernel": (3, 1), "padding": (1, 0)}
        self.branch1x1 = Conv(into, 320, 1)
        self.branch3x3_1 = Conv(into, 384, 1)
        self.branch3x3_2a, self.branch3x3_2b = Conv(384, 384, **row), Conv(384, 384, **column)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Conv(into, 448, 1), Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a, self.branch3x3dbl_3b = Conv(384, 384, **row), Conv(384, 384, **column)
        self.branch_pool = Conv(into, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        once = self.branch3x3_1(x)
        twice = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        near = F.max_pool2d(x, 3, 1, 1) if self.last else mean_pool(x)
        parts = [self.branch1x1(x), self.branch3x3_2a(once), self.branch3x3_2b(once)]
        parts += [self.branch3x3dbl_3a(twice), self.branch3x3dbl_3b(twice), self.branch_pool(near)]
        return torch.cat(parts, 1)


class Inception(nn.Module):
    """Features of pictures of any size, from pixels as bytes."""

    num_features = 2048

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3, self.Conv2d_2a_3x3 = Conv(3, 32, 3, stride=2), Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1, self.Conv2d_4a_3x3 = Conv(64, 80, 1), Conv(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = BlockA(192, 32), BlockA(256, 64), BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b, self.Mixed_6c = BlockC(768, 128), BlockC(768, 160)
        self.Mixed_6d, self.Mixed_6e = BlockC(768, 160), BlockC(768, 192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b, self.Mixed_7c = BlockE(1280, last=False), BlockE(2048, last=True)
        self.fc = nn.Linear(2048, CLASSES)

    @classmethod
    def from_file(cls, path: Path) -> Inception:
        """The network with published weights; an error names the option that gives the file."""
        hint = f"name {WEIGHTS} with --inception"
        if not path.is_file():
            raise BadInput(f"Inception weights {path}: no such file; {hint}")
        with torch.random.fork_rng(devices=[]):
            net = cls()
        try:
            if path.suffix == ".safetensors":
                state = read_tensors(path)
            else:
                state = torch.load(path, map_location="cpu", weights_only=True)
            counts = {k: v for k, v in net.state_dict().items() if k.endswith("num_batches_tracked")}
            load_strict(net, {**counts, **state}, path)
        except GuardPaintError as error:
            raise BadInput(f"Inception weights {path}: {error}; {hint}") from error
        except Exception as error:  # torch raises almost anything on files from anywhere
            raise BadInput(f"Inception weights {path}: cannot be read ({type(error).__name__}); {hint}") from error
        return on_machine(net.eval().requires_grad_(False))

    @torch.no_grad()
    def forward(self, images: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b 2048"]:
        x = F.interpolate(images.float(), size=(SIZE, SIZE), mode="bilinear", align_corners=False, antialias=True)
        x = (x - 128) / 128
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(F.max_pool2d(x, 3, 2)))
        x = F.max_pool2d(x, 3, 2)
        blocks = (self.Mixed_5b, self.Mixed_5c, self.Mixed_5d, self.Mixed_6a, self.Mixed_6b, self.Mixed_6c)
        for block in (*blocks, self.Mixed_6d, self.Mixed_6e, self.Mixed_7a, self.Mixed_7b, self.Mixed_7c):
            x = block(x)
        return x.mean((2, 3))
