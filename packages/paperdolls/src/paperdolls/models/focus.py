"""What a generator's finishing run dwells on: where figures and things are, and the scenes that are drawn badly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import write_tensors
from guardpaint.store.progress import track
from paperdolls.masks import differs, figure_mask
from paperdolls.render import render
from paperdolls.scene import Scene, sample_scene

GRID = 16
"""Figures are kept on a grid of this side."""
HARD_GARMENTS = ("coat", "dress", "swimsuit")
"""Told from the others by a hem or a neckline; generators learn them last."""
HARD_KINDS = ("blade", "red_flowers")
"""A blade is thin; red flowers drawn as red blobs are a splash, which nobody asked for."""


@dataclass(frozen=True)
class Focus:
    """Of every training scene: cells that a figure or a thing touches; and whether it is hard to draw."""

    figures: Float[Tensor, "n 1 h w"]
    hard: Bool[Tensor, " n"]


def touched(scene: Scene) -> Bool[np.ndarray, "64 64"]:
    """Pixels that figures, what happens to them, and harmless things (flowers, plates, swords) change."""
    plain = replace(scene, flowers=False, sauce=False, sword_on_wall=False)
    if plain == scene:
        return figure_mask(scene)
    return figure_mask(scene) | differs(render(scene).image, render(plain).image)


def is_hard(scene: Scene) -> bool:
    return scene.kind in HARD_KINDS or bool(scene.figures and scene.figures[0].garment in HARD_GARMENTS)


def look_at(first: int, count: int, size: int, cache: Path) -> Focus:
    """Of scenes `first` and on, on a size×size grid; a finished cache of the same scenes is reused."""
    key = {
        "first": first,
        "count": count,
        "grid": GRID,
        "what": "figures and things",
        "hard": [*HARD_KINDS, *HARD_GARMENTS],
    }
    kept = None
    if cache.exists():
        try:
            kept = torch.load(cache, weights_only=True)
        except Exception as error:
            raise BadCheckpoint(f"{cache}: unreadable ({error}); delete it to look anew") from error
    if kept is None or kept["key"] != key:
        masks, hard = [], []
        for seed in track(range(first, first + count), "looking for figures"):
            scene = sample_scene(seed)
            cells = torch.nn.functional.adaptive_max_pool2d(torch.from_numpy(touched(scene))[None].float(), GRID)
            masks.append(cells.to(torch.uint8))
            hard.append(is_hard(scene))
        kept = {"key": key, "figures": torch.stack(masks), "hard": torch.tensor(hard)}
        write_tensors(cache, kept)
    return Focus(torch.nn.functional.adaptive_max_pool2d(kept["figures"].float(), size), kept["hard"])


def weights(figures: Float[Tensor, "b 1 h w"], extra: float) -> Float[Tensor, "b 1 h w"]:
    """1 + extra on figures, 1 elsewhere, scaled to mean 1 over the batch."""
    raw = 1 + extra * figures
    return raw / raw.mean()
