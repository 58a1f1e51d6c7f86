"""Tiles: a picture that is larger than the auditor learned is also audited piece by piece, at the scale it knows.

A large picture is shrunk to the auditor's size, and a small figure in it with it. So the auditor also looks at
overlapping squares that have the size of the pictures it learned from, and at larger squares for larger figures. The
worst view decides. Many views raise more false alarms than one, so the scores of tiles are lowered by a calibrated
number of logits before they are compared with the thresholds of the whole picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.codec import resize
from guardpaint.errors import BadInput
from guardpaint.types import SAFE, Audit, Tile, TileAudit

MOST_CELLS = 128
"""Longest side of a stitched heat map."""
MOST_TILES = 64
"""Tiles of one look. It lets a picture four times as large as the auditor learned be seen at its own scale (49 + 9)."""
FINER = 0.98
"""Steps in which a picture with too many tiles is shrunk."""


def starts(length: int, side: int) -> list[int]:
    """Where tiles begin along one edge: evenly, each overlapping the one before by half or more."""
    if length <= side:
        return [0]
    count = math.ceil((length - side) / (side / 2)) + 1
    return [round(i * (length - side) / (count - 1)) for i in range(count)]


def tiling(size: tuple[int, int], side: int) -> tuple[Tile, ...]:
    """Tiles of `side`, twice `side`, … up to below the shorter edge; none if the whole picture is not larger."""
    found: list[Tile] = []
    shorter = min(size)
    while side < shorter:
        found += [Tile(top, left, side, side) for top in starts(size[0], side) for left in starts(size[1], side)]
        side *= 2
    return tuple(found)


@lru_cache(64)
def bounded(size: tuple[int, int], side: int) -> tuple[tuple[int, int], tuple[Tile, ...]]:
    """The tiles of a picture, at most `MOST_TILES`, and the size of the picture that they are cut from.

    Where there would be more, the picture is shrunk first: every place is still seen, at a smaller scale.
    """
    shown, scale, tiles = size, 1.0, tiling(size, side)
    while len(tiles) > MOST_TILES:
        scale *= FINER
        shown = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
        if min(shown) <= side:
            raise BadInput(f"a picture of {size[1]}x{size[0]} is too long for its height: at most {MOST_TILES} tiles")
        tiles = tiling(shown, side)
    return shown, tiles


def lowered(audit: Audit, offset: float) -> Audit:
    """An audit whose scores of harm are lowered by `offset` logits; F, P, B and the embeddings stay as they are."""
    if offset == 0:
        return audit
    scale = math.exp(-offset)
    odds = {c: p if c == SAFE else p * scale for c, p in audit.probs.items()}
    total = sum(odds.values())
    if total <= 0:
        odds, total = {c: float(c == SAFE) for c in odds}, 1.0
    probs = {c: p / total for c, p in odds.items()}
    adv = lowered_probability(audit.adv_prob, scale)
    maps = torch.stack(list(audit.class_maps.values()))
    factors = torch.tensor([1.0 if c == SAFE else scale for c in audit.class_maps]).view(-1, 1, 1)
    maps = maps * factors
    maps = maps / maps.sum(0).clamp_min(1e-12)
    heat = audit.adv_map * scale / (audit.adv_map * scale + 1 - audit.adv_map).clamp_min(1e-12)
    return replace(
        audit,
        adv_prob=adv,
        probs=probs,
        safety=min(1 - adv, probs[SAFE]),
        adv_map=heat,
        class_maps=dict(zip(audit.class_maps, maps, strict=True)),
    )


def lowered_probability(p: float, scale: float) -> float:
    """A probability whose odds are multiplied by `scale`."""
    return p * scale / max(p * scale + 1 - p, 1e-12)


def merged(whole: Audit, views: Sequence[TileAudit], size: tuple[int, int]) -> Audit:
    """One audit of all views: the scores of harm of the worst view, the maps stitched, the rest from the whole."""
    every = (TileAudit(Tile(0, 0, *size), whole), *views)
    worst = min((v.audit for v in every), key=lambda a: a.safety)
    return replace(
        whole,
        adv_prob=max(v.audit.adv_prob for v in every),
        probs=worst.probs,
        safety=worst.safety,
        adv_map=stitched(whole.adv_map, [(v.tile, v.audit.adv_map) for v in views], size),
        class_maps={
            name: stitched(heat, [(v.tile, v.audit.class_maps[name]) for v in views], size, least=name == SAFE)
            for name, heat in whole.class_maps.items()
        },
        tiles=every,
    )


def stitched(
    whole: Float[Tensor, "u v"],
    parts: Sequence[tuple[Tile, Float[Tensor, "k l"]]],
    size: tuple[int, int],
    least: bool = False,
) -> Float[Tensor, "a b"]:
    """Heat maps of tiles laid over that of the whole picture; where several meet, the highest counts (or the least)."""
    if not parts:
        return whole
    per_pixel = max(heat.shape[0] / tile.height for tile, heat in parts)
    per_pixel = min(per_pixel, MOST_CELLS / max(size))
    canvas = enlarged(whole, (max(1, round(size[0] * per_pixel)), max(1, round(size[1] * per_pixel))))
    for tile, heat in parts:
        rows = slice(round(tile.top * per_pixel), max(1, round((tile.top + tile.height) * per_pixel)))
        columns = slice(round(tile.left * per_pixel), max(1, round((tile.left + tile.width) * per_pixel)))
        part = canvas[rows, columns]
        own = enlarged(heat, (int(part.shape[0]), int(part.shape[1])))
        canvas[rows, columns] = torch.minimum(part, own) if least else torch.maximum(part, own)
    return canvas


def enlarged(heat: Float[Tensor, "u v"], size: tuple[int, int]) -> Float[Tensor, "a b"]:
    """A copy of a heat map at another size."""
    return F.interpolate(heat[None, None].float(), size=size, mode="bilinear", align_corners=False)[0, 0].clone()


def cut(source: Float[Tensor, "3 h w"], tile: Tile, pixels: int) -> Float[Tensor, "3 p p"]:
    """One tile of a picture at audit size."""
    part = source[:, tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
    return resize(part[None], (pixels, pixels))[0]


def touches(tile: Tile, mask: Float[Tensor, "h w"], shown: tuple[int, int]) -> bool:
    """Whether a mask, given at any size, covers something of a tile of a picture that is `shown` pixels large."""
    down, across = mask.shape[0] / shown[0], mask.shape[1] / shown[1]
    rows = slice(math.floor(tile.top * down), math.ceil((tile.top + tile.height) * down))
    columns = slice(math.floor(tile.left * across), math.ceil((tile.left + tile.width) * across))
    return bool((mask[rows, columns] > 0).any())


def within(audit: Audit, mask: Float[Tensor, "h w"]) -> Audit:
    """An audit in which only the whole picture and the tiles that a mask touches count.

    Two harms far apart are repaired one after the other; each repair is judged where it is.
    """
    if not audit.tiles:
        return audit
    box = audit.tiles[0].tile
    views = [v for v in audit.tiles[1:] if touches(v.tile, mask, (box.height, box.width))]
    return merged(audit.tiles[0].audit, views, (box.height, box.width)) if views else audit.tiles[0].audit


def where(tile: Tile) -> str:
    """A tile in words."""
    return f"in the {tile.width} px tile at x={tile.left}, y={tile.top}"
