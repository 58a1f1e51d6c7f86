"""Region mining and masks, including what scaling must not lose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardpaint.audit.regions import dilate, gaussian, heat_at, latent_mask, mine, soft_mask, union
from guardpaint.config import GuardConfig


def two_blobs():
    heat = torch.zeros(32, 32)
    heat[4:12, 4:12] = 0.9
    heat[20:26, 20:26] = 0.8
    return heat


def test_percentile_mode_takes_the_hottest_fifteen_percent():
    heat = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    regions = mine(heat, (64, 64), GuardConfig(regions=16, min_region=0.0))
    assert 0.10 < union(regions).coverage < 0.20


def test_components_largest_first_and_tiny_ones_dropped():
    config = GuardConfig(mask_threshold="calibrated", mask_level=0.5)
    regions = mine(two_blobs(), (128, 128), config)
    assert len(regions) == 2 and regions[0].coverage > regions[1].coverage
    assert not (regions[0].mask & regions[1].mask).any()
    assert len(mine(two_blobs(), (128, 128), config.with_(regions=1))) == 1
    assert len(mine(two_blobs(), (128, 128), config.with_(min_region=0.05))) == 1


def test_flat_maps_and_cold_maps_have_no_region():
    assert mine(torch.full((8, 8), 0.7), (64, 64), GuardConfig()) == []
    assert mine(torch.zeros(8, 8), (64, 64), GuardConfig(mask_threshold="calibrated")) == []


def test_all_hot_is_one_region_covering_everything():
    regions = mine(torch.ones(8, 8), (64, 64), GuardConfig(mask_threshold="calibrated"))
    assert len(regions) == 1 and regions[0].coverage == 1.0
    assert soft_mask(regions[0].mask, 1.0, 1.0).min() == 1.0


@settings(deadline=None)
@given(radius=st.floats(0.05, 6.0))
def test_sub_pixel_dilation_is_never_rounded_to_nothing(radius):
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[12:20, 12:20] = True
    grown = dilate(mask, radius)
    assert grown.sum() > mask.sum()
    assert dilate(mask, radius + 0.1).sum() > grown.sum()
    assert (grown[mask] == 1).all()


def test_dilation_by_hand():
    """Radius 1.5 around one pixel: 4 neighbours at distance 1 → 1; diagonals at √2 → 1.0858 → 1; at 2 → 0.5."""
    mask = torch.zeros(7, 7, dtype=torch.bool)
    mask[3, 3] = True
    out = dilate(mask, 1.5)
    assert out[3, 4] == 1 and out[4, 4] == 1 and out[3, 5] == pytest.approx(0.5)


@settings(deadline=None)
@given(sigma=st.floats(0.12, 4.0))
def test_sub_pixel_feather_still_softens(sigma):
    edge = torch.zeros(32, 32)
    edge[:, 16:] = 1
    soft = gaussian(edge, sigma)
    assert 0 < soft[16, 15] < 0.5 < soft[16, 16] < 1
    assert torch.allclose(soft.sum(), edge.sum(), rtol=1e-3)


def test_the_papers_kernel_at_512():
    """σ = 5 with 15×15: exactly 7 pixels beyond the edge are touched."""
    edge = torch.zeros(512, 512)
    edge[:, 256:] = 1
    soft = gaussian(edge, 5.0)
    assert soft[256, 249] > 0 and soft[256, 248] == 0


def test_masks_scale_with_the_view():
    """The same knobs cover the same share of a 64 and of a 512 view."""
    shares = []
    for size in (64, 512):
        region = torch.zeros(size, size, dtype=torch.bool)
        region[size // 4 : size // 2, size // 4 : size // 2] = True
        shares.append(float(soft_mask(region, 0.6, 0.5).mean()))
    assert shares[0] == pytest.approx(shares[1], rel=0.08)


def test_latent_mask_keeps_zero_at_zero():
    mask = torch.zeros(64, 64)
    mask[20:30, 20:30] = 0.7
    small = latent_mask(mask, (16, 16))
    assert small.shape == (16, 16) and (small[:4] == 0).all() and (small[8:] == 0).all() and small.max() > 0.4
    assert torch.equal(latent_mask(mask, (64, 64)), mask)


def test_heat_is_bilinear():
    assert heat_at(torch.tensor([[0.0, 1.0]]), (1, 4)).tolist() == [[0.0, 0.25, 0.75, 1.0]]
