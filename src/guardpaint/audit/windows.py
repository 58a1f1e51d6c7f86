"""Heat maps of a black box: it is shown overlapping windows of the picture.

A window is a picture out of context, so a detector scores it higher or lower than a whole one: windows of harmless
photographs reach scores that whole photographs never do. Windows therefore have levels of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.calibration import needed
from guardpaint.errors import BadInput
from guardpaint.types import Tile

BATCH = 32


def windows(size: tuple[int, int], cells: int) -> list[Tile]:
    """(cells + 1)² windows, row by row: each shows two by two of cells × cells, those at the edge what is there.

    So every cell is in four windows, and a harm in one cell makes exactly those four look harmful.
    """
    rows, columns = ([round(side * i / cells) for i in range(cells + 1)] for side in size)
    spans = [(max(0, i - 1), min(cells, i + 1)) for i in range(cells + 1)]
    return [
        Tile(rows[a], columns[c], max(1, rows[b] - rows[a]), max(1, columns[d] - columns[c]))
        for a, b in spans
        for c, d in spans
    ]


def window_scores(
    images: Float[Tensor, "b 3 h w"], cells: int, score: Callable[[Tensor], Float[Tensor, "n c"]]
) -> Float[Tensor, "b n n c"]:
    """The raw scores of every window. `score` takes pictures of one size and resizes them for its model."""
    found: dict[int, Tensor] = {}
    tiles = windows((int(images.shape[-2]), int(images.shape[-1])), cells)
    for shape in dict.fromkeys((t.height, t.width) for t in tiles):
        same = [k for k, t in enumerate(tiles) if (t.height, t.width) == shape]
        crops = torch.stack([cut(images, tiles[k]) for k in same], dim=1).flatten(0, 1)
        scores = torch.cat([score(part) for part in crops.split(BATCH)])
        found |= dict(zip(same, scores.unflatten(0, (len(images), len(same))).unbind(1), strict=True))
    return torch.stack([found[k] for k in range(len(tiles))], dim=1).unflatten(1, (cells + 1, cells + 1))


def cut(images: Float[Tensor, "b 3 h w"], tile: Tile) -> Float[Tensor, "b 3 u v"]:
    """One window of every picture."""
    return images[:, :, tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]


def spread(scores: Float[Tensor, "b n n c"]) -> Float[Tensor, "b m m c"]:
    """The map of the cells: each is the mean of the four windows that show it."""
    return (scores[:, :-1, :-1] + scores[:, :-1, 1:] + scores[:, 1:, :-1] + scores[:, 1:, 1:]) / 4


def window_level(worst: Sequence[float], alpha: float, least: float) -> float:
    """The level that the worst window of a new harmless picture passes with a probability of at most α.

    `worst` are the worst windows of n harmless pictures; the ⌈(n+1)(1−α)⌉-th smallest is the level, if not `least`.
    """
    if len(worst) < needed(alpha):
        raise BadInput(f"{len(worst)} harmless pictures: alpha={alpha} needs at least {needed(alpha)}")
    return max(least, sorted(worst)[math.ceil((len(worst) + 1) * (1 - alpha) - 1e-9) - 1])
