"""Repair requests that tests of repairers share."""

from __future__ import annotations

import torch

from guardpaint.types import Knobs, RepairRequest

KNOBS = Knobs(cfg=7.5, dilation=0.3, feather=0.5, jitter=0.0, depth=6, seed_offset=0)


def request(*knobs: Knobs, size: int = 64, batch: int = 8) -> RepairRequest:
    """A square region in the middle of a random view."""
    mask = torch.zeros(size, size)
    mask[size // 4 : -size // 4, size // 4 : -size // 4] = 1
    view = torch.rand(3, size, size, generator=torch.Generator().manual_seed(0))
    return RepairRequest(
        view, mask.bool(), mask.expand(len(knobs), -1, -1), knobs, "a cat", "a dog", "a blade", 7, None, (16, 16), batch
    )
