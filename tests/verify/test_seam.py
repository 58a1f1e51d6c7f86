"""The ring and the LPIPS formula."""

from __future__ import annotations

import math

import pytest
import torch

from guardpaint.testing import small
from guardpaint.verify.seam import BackboneSeam, PixelSeam, ring, seam_quality


def square(size=512):
    mask = torch.zeros(size, size)
    mask[size // 4 : 3 * size // 4, size // 4 : 3 * size // 4] = 1
    return mask


def test_ring_is_seventeen_wide_at_512():
    """r = 8: the boundary row has 8 px inside and 8 outside = 16 pixels of ring along a straight edge."""
    r = ring(square())
    assert r[256].sum() == 2 * 16
    assert r[256, 128 - 8 : 128 + 8].all() and not r[256, 128 + 8] and not r[256, 128 - 9]


def test_ring_scales_with_the_view():
    assert ring(square(64))[32].sum() == 2 * 2


def test_quality_by_hand():
    """Distance 0.2 on the ring → Q = exp(−5·0.2) = e⁻¹; an unchanged candidate has Q = 1."""

    class Constant:
        name = "constant"

        def distance(self, candidates, control):
            return torch.full((len(candidates), 64, 64), 0.2)

    images, masks = torch.rand(2, 3, 64, 64), square(64).expand(2, -1, -1)
    q = seam_quality(Constant(), images, images[0], masks)
    assert q.tolist() == pytest.approx([math.exp(-1)] * 2)
    assert seam_quality(PixelSeam(), images[:1], images[0], masks[:1]).item() == 1.0


@pytest.mark.parametrize("full", [torch.zeros(64, 64), torch.ones(64, 64)])
def test_a_mask_without_a_boundary_has_no_seam(full):
    q = seam_quality(PixelSeam(), torch.rand(1, 3, 64, 64), torch.rand(3, 64, 64), full[None])
    assert q.item() == 1.0


def test_backbone_metric_grows_with_the_artefact():
    g = torch.Generator().manual_seed(0)
    control, noise = torch.rand(3, 64, 64, generator=g), torch.randn(3, 64, 64, generator=g)
    candidates = torch.stack([(control + k * noise).clamp(0, 1) for k in (0.0, 0.05, 0.2, 0.5)])
    q = seam_quality(BackboneSeam(small.auditor()), candidates, control, square(64).expand(4, -1, -1))
    assert q[0].item() == pytest.approx(1.0) and (q.diff() < 0).all()
