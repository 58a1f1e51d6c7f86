"""FID and KID of two folders of pictures, in the feature space of FID's Inception network or of a CLIP vision model.

guardpaint eval fid REFERENCE MADE --inception pt_inception-2015-12-05-6726825d.pth --features hub:openai/clip-…
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from guardpaint.errors import BadInput
from guardpaint.evaluate.inception import Inception
from guardpaint.evaluate.real_metrics import VisionFeatures, as_bytes, pictures_in
from guardpaint.store.images import load_image
from guardpaint.store.progress import track

SUBSETS, SUBSET = 100, 1000
"""KID is the mean over this many subsets of at most this many pictures, as torchmetrics and its papers have it."""


def measured(reference: Path, made: Path, inception: Path | None, features: str | None) -> dict[str, float]:
    """FID and KID by the name of the feature space: `fid` and `kid` are Inception's."""
    spaces: dict[str, nn.Module] = {}
    if inception is not None:
        spaces |= {"": Inception.from_file(inception)}
    if features is not None:
        spaces |= {".clip": VisionFeatures.from_pretrained(features)}
    out: dict[str, float] = {}
    for name, net in spaces.items():
        one, other = pictures_in(reference), pictures_in(made)
        out |= {f"fid{name}": fid(net, one, other), f"kid{name}": kid(net, one, other)}
    return out


def fid(features: nn.Module, real: Sequence[Path], made: Sequence[Path], batch: int = 16) -> float:
    """Fréchet distance between two sets of pictures in a feature space; FID when the space is Inception's."""
    distances = torchmetrics_image("fid").FrechetInceptionDistance
    return float(compared(distances(feature=features, normalize=False, input_img_size=(3, 64, 64)), real, made, batch))


def kid(features: nn.Module, real: Sequence[Path], made: Sequence[Path], batch: int = 16) -> float:
    """Kernel distance between two sets of pictures in a feature space; KID when the space is Inception's."""
    distances, size = torchmetrics_image("kid").KernelInceptionDistance, min(SUBSET, len(real), len(made))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that features take memory
        torch.manual_seed(0)  # it draws its subsets from the global generator
        metric = distances(feature=features, normalize=False, subsets=SUBSETS, subset_size=max(1, size))
        return float(compared(metric, real, made, batch)[0])


def compared(metric: Any, real: Sequence[Path], made: Sequence[Path], batch: int) -> Any:
    """Show both sets to a metric of torchmetrics and return its value."""
    if min(len(real), len(made)) < 2:
        raise BadInput(f"{len(real)} and {len(made)} pictures: a distance between sets needs at least two of each")
    device = next((p.device for p in metric.inception.parameters()), torch.device("cpu"))
    metric.to(device)
    side = getattr(metric.inception, "side", None)
    for paths, is_real in ((real, True), (made, False)):
        for i in track(range(0, len(paths), batch), description="reference" if is_real else "made"):
            pictures = [load_image(p).convert("RGB") for p in paths[i : i + batch]]
            for same in by_size([p.resize((side, side)) if side else p for p in pictures]):
                metric.update(torch.stack([as_bytes(p) for p in same]).to(device), real=is_real)
    return metric.compute()


def by_size(pictures: Sequence[Image.Image]) -> list[list[Image.Image]]:
    """Pictures in groups of one size."""
    groups: dict[tuple[int, int], list[Image.Image]] = {}
    for picture in pictures:
        groups.setdefault(picture.size, []).append(picture)
    return list(groups.values())


def torchmetrics_image(module: str) -> Any:
    """A module of torchmetrics; an error says how to install it."""
    try:
        return importlib.import_module(f"torchmetrics.image.{module}")
    except ImportError as error:
        raise BadInput("distances between sets need torchmetrics: pip install 'guardpaint[metrics]'") from error
