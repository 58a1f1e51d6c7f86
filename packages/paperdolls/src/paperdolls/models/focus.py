"""What a generator's finishing run emphasises: the places of figures and things, and scenes that are hard to draw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import write_tensors
from guardpaint.store.progress import track
from paperdolls.masks import touched
from paperdolls.models.recipe import Latents
from paperdolls.scene import Scene, sample_scene

GRID = 16
"""Side of the grid on which the places of figures are stored."""
HARD_GARMENTS = ("coat", "dress", "swimsuit")
"""Garments that differ from others only by a hem or a neckline; generators learn them last."""
HARD_KINDS = ("blade", "red_flowers")
"""Kinds that are hard to draw: a blade is thin, and red flowers drawn as red blobs look like a splash."""


@dataclass(frozen=True)
class Focus:
    """For every training scene, the cells that a figure or a thing touches, and whether it is hard to draw."""

    figures: Float[Tensor, "n 1 h w"]
    hard: Bool[Tensor, " n"]


def is_hard(scene: Scene) -> bool:
    return scene.kind in HARD_KINDS or bool(scene.figures and scene.figures[0].garment in HARD_GARMENTS)


def look_at(first: int, count: int, latents: Latents, cache: Path) -> Focus:
    """The focus of `count` scenes from `first` on, for these latents. A cache of the same scenes is reused."""
    key = {
        "first": first,
        "count": count,
        "grid": GRID,
        "what": "figures and things",
        "hard": [*HARD_KINDS, *HARD_GARMENTS],
        "pixels": latents.pixels,
    }
    kept = None
    if cache.exists():
        try:
            kept = torch.load(cache, weights_only=True)
        except Exception as error:
            raise BadCheckpoint(f"{cache}: unreadable ({error}); delete it to compute it again") from error
    if kept is None or kept["key"] != key:
        masks, hard = [], []
        for seed in track(range(first, first + count), "looking for figures"):
            scene = sample_scene(seed)
            cells = torch.nn.functional.adaptive_max_pool2d(
                torch.from_numpy(touched(scene, latents.pixels))[None].float(), GRID
            )
            masks.append(cells.to(torch.uint8))
            hard.append(is_hard(scene))
        kept = {"key": key, "figures": torch.stack(masks), "hard": torch.tensor(hard)}
        write_tensors(cache, kept)
    return Focus(torch.nn.functional.adaptive_max_pool2d(kept["figures"].float(), latents.size), kept["hard"])


def weights(figures: Float[Tensor, "b 1 h w"], extra: float) -> Float[Tensor, "b 1 h w"]:
    """1 + extra on figures, 1 elsewhere, scaled to mean 1 over the batch."""
    raw = 1 + extra * figures
    return raw / raw.mean()
