"""Calibrate how a guard looks at large pictures: the threshold of tiles, and the settings that the guard is made for.

guardpaint calibrate-scope DIR --pixels 64 192 --guidance 1 8 --steps 4 50

Large pictures are put together from known ones: enlarged, for large figures, and as mosaics, for many small ones. Their
truth is that of the pictures in them. The offset of tiles is the smallest one with which tiles raise at most the
wanted share of false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.tiles import lowered
from guardpaint.config import Scope
from guardpaint.draft.codec import resize
from guardpaint.draft.loading import chosen_device
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadInput
from guardpaint.evaluate.statistics import wilson
from guardpaint.guard import MANIFEST, GuardPaint
from guardpaint.parts.folder import own_folder
from guardpaint.store.checkpoint import read_json, write_json
from guardpaint.store.progress import track
from guardpaint.store.results import metric, write_results
from guardpaint.testbed import KnownPicture, KnownPictures, open_testbed
from guardpaint.testbed.protocol import need
from guardpaint.types import SAFE

OFFSETS = tuple(k / 4 for k in range(41))
"""Offsets that are tried, in logits."""


@dataclass(frozen=True)
class LargePicture:
    """A large picture whose truth is known."""

    image: Float[Tensor, "3 h w"]
    category: str
    layout: str


@dataclass(frozen=True)
class Looked:
    """What a guard sees of one large picture."""

    picture: LargePicture
    whole: bool
    """Whether the whole picture is flagged."""
    tiles: float | None
    """The largest offset at which a tile is still flagged; None if none is at offset 0."""

    def flagged(self, offset: float) -> bool:
        return self.whole or self.by_tiles(offset)

    def by_tiles(self, offset: float) -> bool:
        return self.tiles is not None and self.tiles >= offset


def pixels_of(picture: KnownPicture, side: int) -> Float[Tensor, "3 s s"]:
    """A known picture at a given side."""
    image = torch.from_numpy(np.ascontiguousarray(picture.image)).permute(2, 0, 1).float() / 255
    return resize(image[None], (side, side))[0]


def mosaic(cells: Sequence[Float[Tensor, "3 s s"]], size: int, corner: tuple[int, int]) -> Float[Tensor, "3 n n"]:
    """Pictures side by side in a square, of which `size` pixels are cut out at a corner."""
    columns = math.isqrt(len(cells))
    rows = [torch.cat(list(cells[r * columns : (r + 1) * columns]), dim=2) for r in range(columns)]
    return torch.cat(rows, dim=1)[:, corner[0] : corner[0] + size, corner[1] : corner[1] + size]


def large_pictures(known: Sequence[KnownPicture], side: int, size: int, seed: int = 0) -> list[LargePicture]:
    """One enlarged picture and one mosaic of each known picture.

    The known picture lies whole within its mosaic, anywhere; all others there are harmless.
    """
    generator = torch.Generator().manual_seed(seed)
    harmless = [p for p in known if p.prompt.category == SAFE]
    if not harmless:
        raise BadInput("no harmless picture is known: mosaics are made of them")

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    columns = math.ceil(size / side) + 1
    found = []
    for picture in known:
        found.append(LargePicture(pixels_of(picture, size), picture.prompt.category, "enlarged"))
        cells = [pixels_of(harmless[draw(0, len(harmless) - 1)], side) for _ in range(columns**2)]
        place = draw(0, columns - 1), draw(0, columns - 1)
        cells[place[0] * columns + place[1]] = pixels_of(picture, side)
        corner = [draw(max(0, (k + 1) * side - size), min(k * side, columns * side - size)) for k in place]
        found.append(LargePicture(mosaic(cells, size, (corner[0], corner[1])), picture.prompt.category, "mosaic"))
    return found


def look(guard: GuardPaint, picture: LargePicture) -> Looked:
    """The audit of a large picture by a guard whose tiles are not lowered."""
    audit = guard.audit_image(picture.image)
    views = audit.tiles or ()
    whole = views[0].audit if views else audit

    def flagged(offset: float) -> bool:
        return any(guard.parts.finding(lowered(v.audit, offset), 1.0) is not None for v in views[1:])

    best = None
    for offset in OFFSETS:
        if not flagged(offset):
            break
        best = offset
    return Looked(picture, guard.parts.finding(whole, 1.0) is not None, best)


def lowest_offset(looks: Sequence[Looked], alarms: float) -> float:
    """The smallest offset at which tiles alone flag at most a share `alarms` of the harmless pictures."""
    harmless = [seen for seen in looks if seen.picture.category == SAFE]
    if len(harmless) < 1 / alarms:
        raise BadInput(
            f"{len(harmless)} harmless pictures: a share of {alarms:g} needs at least {math.ceil(1 / alarms)}"
        )
    for offset in OFFSETS:
        share = sum(seen.by_tiles(offset) and not seen.whole for seen in harmless) / len(harmless)
        if share <= alarms:
            return offset
    raise BadInput(
        f"tiles flag more than {alarms:g} of {len(harmless)} harmless pictures even when they are lowered by "
        f"{OFFSETS[-1]:g} logits: allow more with --alarms, or train the auditor on such pictures"
    )


def run(
    guard_dir: Path,
    scope: Scope,
    out: Path,
    *,
    alarms: float,
    count: int,
    testbed: str | None,
    device: str | None = None,
) -> Scope:
    """Find the tile offset of a guard's scope, write rows and metrics to `out` and the scope into the guard."""
    own_folder(guard_dir)
    known = need(open_testbed(testbed), KnownPictures, "calibrate-scope").pictures("scope", count)
    sizes = sorted({min(2 * scope.side, scope.pixels[1]), scope.pixels[1]} - {scope.side})
    guard = GuardPaint.from_pretrained(guard_dir, scope=replace(scope, tile_offset=0.0))
    guard.to(chosen_device(LoadOptions(device=device)))
    looks: list[tuple[int, Looked]] = []
    for size in sizes:
        pictures = large_pictures(known, scope.side, size, seed=size)
        looks += [(size, look(guard, p)) for p in track(pictures, f"auditing at {size} pixels")]
    offset = max((lowest_offset([seen for s, seen in looks if s == size], alarms) for size in sizes), default=0.0)
    found = replace(scope, tile_offset=offset, calibrated=True)
    rows = [
        {"size": size, "layout": seen.picture.layout, "category": seen.picture.category,
         "whole": int(seen.whole), "tiles_up_to": "" if seen.tiles is None else seen.tiles}
        for size, seen in looks
    ]  # fmt: skip
    metrics = {"tile_offset": metric(offset, len(looks))}
    for size in sizes:
        for name, wanted, hit in (
            ("false_alarms", True, lambda seen: seen.flagged(offset)),
            ("false_alarms_whole", True, lambda seen: seen.whole),
            ("missed", False, lambda seen: not seen.flagged(offset)),
            ("missed_whole", False, lambda seen: not seen.whole),
        ):
            hits = [hit(seen) for s, seen in looks if s == size and (seen.picture.category == SAFE) == wanted]
            metrics[f"{name}.{size}"] = metric(sum(hits) / len(hits), len(hits), ci=wilson(sum(hits), len(hits)))
    write_results(out, metrics, rows, seed=0)
    manifest = read_json(guard_dir / MANIFEST)
    manifest["config"] = {**manifest["config"], "scope": asdict(found)}
    write_json(guard_dir / MANIFEST, manifest)
    return found
