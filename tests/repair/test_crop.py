"""Crop-to-region: the geometry as properties, and that both repairers leave the rest of the picture alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repairs import KNOBS, request

from guardpaint.audit.regions import soft_mask
from guardpaint.repair.crop import cut, pasted, reach, window
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.testing import small_inpainters
from guardpaint.types import Knobs, RepairRequest, Tile

unit = st.floats(0, 1)


@st.composite
def requests(draw):
    """A rectangle anywhere in a picture, borders and single pixels included, with one to three candidates."""
    height, width = draw(st.integers(8, 90)), draw(st.integers(8, 90))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    bottom, right = draw(st.integers(top + 1, height)), draw(st.integers(left + 1, width))
    region = torch.zeros(height, width, dtype=torch.bool)
    region[top:bottom, left:right] = True
    knobs = tuple(Knobs(7.5, draw(unit), draw(unit), 0.1, 5, 100 * i) for i in range(draw(st.integers(1, 3))))
    masks = torch.stack([soft_mask(region, k.dilation, k.feather) for k in knobs])
    view = torch.rand(3, height, width, generator=torch.Generator().manual_seed(0))
    return RepairRequest(view, region, masks, knobs, "a cat", "a dog", "", 7, None, (2, 2))


@settings(max_examples=200, deadline=None)
@given(asked=requests(), margin=st.floats(0, 8))
def test_a_window_covers_every_mask_and_stays_in_the_picture(asked, margin):
    tile = window(asked, margin)
    height, width = asked.view.shape[-2:]
    assert tile.top >= 0 and tile.top + tile.height <= height
    assert tile.left >= 0 and tile.left + tile.width <= width
    outside = torch.ones(height, width, dtype=torch.bool)
    outside[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width] = False
    assert not (asked.masks > 0)[:, outside].any()


@settings(max_examples=200, deadline=None)
@given(asked=requests(), margin=st.floats(0, 8))
def test_a_window_is_as_square_as_the_picture_allows(asked, margin):
    tile = window(asked, margin)
    height, width = asked.view.shape[-2:]
    assert tile.height == tile.width or (tile.height == height < tile.width) or (tile.width == width < tile.height)


@settings(max_examples=200, deadline=None)
@given(asked=requests(), margin=st.floats(0, 8))
def test_a_window_is_that_of_the_region_whoever_competes(asked, margin):
    """Otherwise a candidate would be another picture in other company, and a preview could not be continued."""
    whole = window(asked, margin)
    for i in range(len(asked.knobs)):
        assert window(replace(asked, masks=asked.masks[i : i + 1], knobs=asked.knobs[i : i + 1]), margin) == whole


@settings(max_examples=200, deadline=None)
@given(asked=requests(), margin=st.floats(0, 4), more=st.floats(0, 4))
def test_more_context_is_a_larger_window_around_the_smaller_one(asked, margin, more):
    small, large = window(asked, margin), window(asked, margin + more)
    assert large.top <= small.top and large.left <= small.left
    assert large.top + large.height >= small.top + small.height
    assert large.left + large.width >= small.left + small.width


@settings(max_examples=100, deadline=None)
@given(asked=requests(), margin=st.floats(0, 2))
def test_cutting_and_pasting_what_was_cut_changes_nothing(asked, margin):
    tile = window(asked, margin)
    part = cut(asked, tile)
    n = len(asked.knobs)
    whole = pasted(asked.view, tile, part.view.expand(n, -1, -1, -1))
    assert torch.equal(whole, asked.view.expand(n, -1, -1, -1))
    assert part.masks.shape[-2:] == part.region.shape == part.view.shape[-2:] == (tile.height, tile.width)
    assert torch.equal(part.masks.sum((1, 2)), asked.masks.sum((1, 2))) or torch.allclose(
        part.masks.sum((1, 2)), asked.masks.sum((1, 2))
    )


def test_windows_by_hand():
    """A 10 px region in a 512 px view: masks reach 32 + 14 px, so the box has 102; half as much context on each side."""
    view, region = torch.zeros(3, 512, 512), torch.zeros(512, 512, dtype=torch.bool)
    region[200:210, 300:310] = True
    asked = RepairRequest(view, region, region[None].float(), (KNOBS,), "", "", "", 1, None, (8, 8))
    assert reach(512) == 46
    assert window(asked, 0.0) == Tile(154, 254, 102, 102)
    assert window(asked, 0.5) == Tile(103, 203, 204, 204)
    region[:] = False
    region[:, 500:] = True
    assert window(asked, 0.0) == Tile(0, 0, 512, 512)
    region[:] = False
    region[0, 0] = True
    assert window(replace(asked, masks=torch.zeros(1, 512, 512)), 0.0) == Tile(0, 0, 47, 47)


def test_nothing_to_repair_is_the_whole_picture():
    asked = request(KNOBS)
    asked = replace(asked, region=torch.zeros(64, 64, dtype=torch.bool), masks=torch.zeros(1, 64, 64))
    assert window(asked, 0.5) == Tile(0, 0, 64, 64)


def in_a_corner(*knobs: Knobs) -> RepairRequest:
    """A small region in the corner of a large picture that is not square."""
    region = torch.zeros(160, 240, dtype=torch.bool)
    region[4:20, 210:236] = True
    view = torch.rand(3, 160, 240, generator=torch.Generator().manual_seed(2))
    masks = torch.stack([soft_mask(region, k.dilation, k.feather) for k in knobs])
    return RepairRequest(view, region, masks, knobs, "a cat", "a dog", "", 7, None, (40, 60))


KNOB_SETS = tuple(replace(KNOBS, dilation=d, depth=3, seed_offset=100 * i) for i, d in enumerate((0.0, 0.4, 1.0)))


@pytest.mark.parametrize("cls", [Inpainter, PipelineRepairer])
def test_a_cropped_repair_changes_the_window_alone(cls):
    """The rest is the control, bit for bit; the model sees the region at its own size, whatever the picture's is."""
    pipe = small_inpainters.inpainting("sd")
    repairer = cls(pipe, crop=0.25)
    sizes = []
    hook = pipe.unet.register_forward_hook(lambda m, args, out: sizes.append(tuple(out[0].shape[-2:])))
    asked = in_a_corner(*KNOB_SETS)
    painted = repairer.candidates(asked)
    assert set(sizes) == {(16, 16)}
    sizes.clear()
    cls(pipe).candidates(asked)
    assert set(sizes) == {(16, 24)}
    hook.remove()
    tile = window(asked, 0.25)
    rows, columns = slice(tile.top, tile.top + tile.height), slice(tile.left, tile.left + tile.width)
    assert tile.height * tile.width < 160 * 240 / 8 and painted.shape == (3, 3, 160, 240)
    inside = painted[:, :, rows, columns].clone()
    control = asked.view.expand_as(painted)
    assert float((inside - control[:, :, rows, columns]).abs().amax((1, 2, 3)).min()) > 0.05
    painted[:, :, rows, columns] = control[:, :, rows, columns]
    assert torch.equal(painted, control)


@pytest.mark.parametrize("cls", [Inpainter, PipelineRepairer])
def test_a_cropped_candidate_is_the_same_alone(cls):
    repairer = cls(small_inpainters.inpainting("sd"), crop=0.25)
    together = repairer.candidates(in_a_corner(*KNOB_SETS))
    alone = torch.cat([repairer.candidates(in_a_corner(k)) for k in KNOB_SETS])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=0)


def test_a_cropped_preview_goes_on_from_itself():
    """The ranker keeps some candidates; they finish in the window that all of them began in."""
    repairer = Inpainter(small_inpainters.inpainting("sd"), crop=0.25)
    whole = repairer.candidates(in_a_corner(*KNOB_SETS))
    shown, begun = repairer.preview(in_a_corner(*KNOB_SETS))
    assert shown.shape == whole.shape
    rest = repairer.candidates(replace(in_a_corner(KNOB_SETS[0]), begun=begun[:1]))
    torch.testing.assert_close(rest, whole[:1], atol=1e-4, rtol=0)
