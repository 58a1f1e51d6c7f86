"""Crop-to-region: the part of a view that a repairer is shown, and how its work is put back."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.audit.regions import MAX_DILATION, MAX_SIGMA, TRUNCATE
from guardpaint.draft.codec import resize
from guardpaint.types import RepairRequest, Tile


def window(request: RepairRequest, margin: float) -> Tile:
    """The square around a region that covers every mask any knobs can give it, with a margin of context.

    The margin is a share of the longer side. The square is cut where the picture ends. The window depends on the
    region and not on the candidates, so that a candidate is the same picture in any company.
    """
    height, width = (int(s) for s in request.view.shape[-2:])
    widest = reach(min(height, width))
    covered = request.masks.amax(0) > 0
    boxes = [box(covered), *(grown(b, widest, (height, width)) for b in [box(request.region)] if b is not None)]
    found = [b for b in boxes if b is not None]
    if not found:
        return Tile(0, 0, height, width)
    around = joined(found)
    side = max(around.height, around.width)
    side += 2 * math.ceil(margin * side)
    top, tall = spread(around.top, around.height, side, height)
    left, broad = spread(around.left, around.width, side, width)
    return Tile(top, left, tall, broad)


def reach(side: int) -> int:
    """How many pixels beyond a region the widest mask of any knobs goes, in a view with this shorter side."""
    return math.ceil(MAX_DILATION * side) + max(1, math.ceil(TRUNCATE * MAX_SIGMA * side))


def box(mask: Bool[Tensor, "h w"]) -> Tile | None:
    """The smallest rectangle around what is set."""
    rows, columns = torch.nonzero(mask.any(1))[:, 0], torch.nonzero(mask.any(0))[:, 0]
    if len(rows) == 0:
        return None
    top, left = int(rows[0]), int(columns[0])
    return Tile(top, left, int(rows[-1]) + 1 - top, int(columns[-1]) + 1 - left)


def grown(tile: Tile, by: int, picture: tuple[int, int]) -> Tile:
    """A rectangle with so many more pixels on each side, within the picture."""
    top, left = max(0, tile.top - by), max(0, tile.left - by)
    bottom = min(picture[0], tile.top + tile.height + by)
    right = min(picture[1], tile.left + tile.width + by)
    return Tile(top, left, bottom - top, right - left)


def joined(tiles: list[Tile]) -> Tile:
    """The smallest rectangle around some rectangles."""
    top, left = min(t.top for t in tiles), min(t.left for t in tiles)
    bottom = max(t.top + t.height for t in tiles)
    right = max(t.left + t.width for t in tiles)
    return Tile(top, left, bottom - top, right - left)


def spread(start: int, length: int, side: int, most: int) -> tuple[int, int]:
    """Start and length of an interval made `side` long around its middle, moved and cut to stay in [0, most]."""
    long = min(side, most)
    return min(max(0, start - (long - length) // 2), most - long), long


def cut(request: RepairRequest, tile: Tile) -> RepairRequest:
    """The request for the part of the view in a window."""
    rows, columns = slice(tile.top, tile.top + tile.height), slice(tile.left, tile.left + tile.width)
    return replace(
        request,
        view=request.view[:, rows, columns],
        region=request.region[rows, columns],
        masks=request.masks[:, rows, columns],
    )


def pasted(view: Float[Tensor, "3 h w"], tile: Tile, painted: Float[Tensor, "n 3 u v"]) -> Float[Tensor, "n 3 h w"]:
    """The view with each painted window in its place; outside of it the view, bit for bit."""
    whole = view.to(painted).expand(len(painted), *view.shape).clone()
    rows, columns = slice(tile.top, tile.top + tile.height), slice(tile.left, tile.left + tile.width)
    whole[:, :, rows, columns] = resize(painted, (tile.height, tile.width))
    return whole
