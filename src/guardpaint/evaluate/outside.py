"""What a repair changed outside of its mask: SSIM and LPIPS of repaired pictures against the undefended ones.

Both are maps that are averaged over the pixels outside of the mask. A row keeps its mask as 64 × 64 cells; a cell
counts as masked if any of its pixels is.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.draft.loading import on_machine
from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.evaluate.statistics import mean
from guardpaint.store.images import from_pil, load_image
from guardpaint.verify.lpips import Lpips, LpipsAlex, LpipsVGG

PAINTED = "painted"
"""The detail of a row that holds its mask."""
CELLS = 64
WINDOW, SIGMA = 11, 1.5
"""SSIM's Gaussian window."""
C1, C2 = 0.01**2, 0.03**2


def packed(mask: Bool[Tensor, "h w"]) -> str:
    """A mask as text."""
    cells = F.adaptive_max_pool2d(mask[None, None].float(), (CELLS, CELLS))[0, 0] > 0
    return base64.b64encode(np.packbits(cells.numpy()).tobytes()).decode("ascii")


def unpacked(text: str, size: tuple[int, int]) -> Bool[Tensor, "h w"]:
    """The mask behind a text, for a picture of this height and width; it covers every pixel that was masked."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8)).reshape(CELLS, CELLS)
    cells = torch.from_numpy(bits)[None, None].float()
    finer = F.interpolate(cells, size=size, mode="bilinear", align_corners=False)[0, 0]
    return finer > 0


def ssim_map(a: Float[Tensor, "3 h w"], b: Float[Tensor, "3 h w"]) -> Float[Tensor, "h w"]:
    """Structural similarity of every place, with a Gaussian window, mean over channels; 1 where nothing differs."""
    steps = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    line = torch.exp(-(steps**2) / (2 * SIGMA**2))
    window = torch.outer(line, line)[None, None] / line.sum() ** 2
    half = WINDOW // 2

    def smooth(x: Tensor) -> Tensor:
        padded = F.pad(x[:, None], (half, half, half, half), mode="reflect")
        return F.conv2d(padded, window)[:, 0]

    x, y = a.double(), b.double()
    mx, my = smooth(x), smooth(y)
    vx, vy, vxy = smooth(x * x) - mx * mx, smooth(y * y) - my * my, smooth(x * y) - mx * my
    value = ((2 * mx * my + C1) * (2 * vxy + C2)) / ((mx**2 + my**2 + C1) * (vx + vy + C2))
    return value.mean(0).float()


def open_lpips(path: Path | None = None) -> Lpips:
    """LPIPS-Alex, which ships, or LPIPS-VGG from a safetensors file; an error names the option that gives the file."""
    if path is None:
        return on_machine(LpipsAlex.load())
    try:
        return on_machine(LpipsVGG.from_file(path))
    except BadCheckpoint as error:
        raise BadInput(f"LPIPS cannot be measured: {error}; name lpips_vgg.safetensors with --lpips") from error


def changed(
    repaired: Float[Tensor, "3 h w"],
    plain: Float[Tensor, "3 h w"],
    mask: Bool[Tensor, "h w"],
    lpips: Lpips | None = None,
) -> dict[str, float]:
    """Mean SSIM, and LPIPS under its network's name, over the pixels outside of a mask; empty if there are none."""
    outside = ~mask
    if not outside.any():
        return {}
    out = {"ssim": float(ssim_map(repaired, plain)[outside].mean())}
    if lpips is not None:
        out[lpips.name] = float(lpips.distance(repaired[None], plain)[0].cpu()[outside].mean())
    return out


def measured(rows: Sequence[EvaluationRow], lpips: Lpips) -> Iterator[tuple[EvaluationRow, dict[str, float]]]:
    """The change outside of the mask for every repaired picture that was kept together with its undefended twin."""
    plain = {r.same: r for r in rows if r.defence == "undefended" and r.image}
    for row in rows:
        if row.status != "repaired" or not row.detail.get(PAINTED) or not row.image or row.same not in plain:
            continue
        pair = [Path(r.run) / r.image for r in (row, plain[row.same])]
        if not all(p.exists() for p in pair):
            continue
        after, before = (from_pil(load_image(p)) for p in pair)
        if after.shape != before.shape:
            continue
        mask = unpacked(str(row.detail[PAINTED]), (int(after.shape[-2]), int(after.shape[-1])))
        if values := changed(after, before, mask, lpips):
            yield row, values


def metrics(rows: Sequence[EvaluationRow], lpips: Path | None = None) -> dict[str, Any]:
    """`outside_mask.DEFENCE.ssim` and `.lpips_alex`: means over repaired pictures; intervals resample scenes.

    With weights of LPIPS-VGG the second is `.lpips_vgg`.
    """
    network = open_lpips(lpips)
    found = list(measured(rows, network))
    out: dict[str, Any] = {}
    for name in dict.fromkeys(row.defence for row, _ in found):
        own = [(row, values) for row, values in found if row.defence == name]
        for kind in ("ssim", network.name):
            used = [(row, values[kind]) for row, values in own if kind in values]
            if used:
                out[f"outside_mask.{name}.{kind}"] = mean([v for _, v in used], None, [row.seed for row, _ in used])
    return out
