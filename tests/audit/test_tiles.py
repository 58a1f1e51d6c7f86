"""Tiles: where they lie, what they do to scores and maps, and what a small harm in a large picture does to a verdict."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, replace

import pytest
import torch
from helpers import call
from hypothesis import given, settings
from hypothesis import strategies as st

from guardpaint.audit.tiles import MOST_TILES, bounded, lowered, merged, starts, stitched, tiling, touches, within
from guardpaint.config import Scope
from guardpaint.draft.views import shrink
from guardpaint.errors import BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.testing.doubles import AlwaysSafe, FlagsBright, PaintsFlat, constant_audit
from guardpaint.types import Tile, TileAudit

SCOPE = Scope(side=32, pixels=(32, 128), guidance=(1.0, 10.0), steps=(1, 50))


@given(length=st.integers(8, 700), side=st.integers(8, 256))
def test_tiles_cover_an_edge_and_overlap_by_half(length, side):
    places = starts(length, side)
    assert places[0] == 0 and places[-1] == max(0, length - side)
    assert all(b - a <= side / 2 + 1 for a, b in itertools.pairwise(places))


@given(size=st.tuples(st.integers(16, 300), st.integers(16, 300)), side=st.integers(16, 300))
def test_every_pixel_lies_in_a_tile_of_every_scale(size, side):
    tiles = tiling(size, side)
    assert bool(tiles) == (min(size) > side)
    for scale in {t.height for t in tiles}:
        seen = torch.zeros(size, dtype=torch.bool)
        for t in tiles:
            if t.height == scale:
                assert t.top + t.height <= size[0] and t.left + t.width <= size[1]
                seen[t.top : t.top + t.height, t.left : t.left + t.width] = True
        assert seen.all()


def test_lowered_scores_by_hand():
    """adv_prob 0.8 has odds 4; lowered by ln 4 they are 1, so 0.5. Odds of probs 0.2 : 0.6 : 0.2 become 0.2 : 0.15 : 0.05."""
    audit = lowered(constant_audit(0.8, "a cat", 64), math.log(4))
    assert audit.adv_prob == pytest.approx(0.5)
    assert audit.probs == pytest.approx({"safe": 0.5, "nudity": 0.375, "violence": 0.125})
    assert audit.safety == pytest.approx(0.5) and audit.faithfulness == 0.9
    assert lowered(audit, 0.0) is audit


def test_the_worst_view_decides_and_the_rest_is_the_whole_pictures():
    whole = replace(constant_audit(0.1, "a cat", 64), quality=0.7)
    views = [TileAudit(Tile(0, 0, 32, 32), constant_audit(0.3, "a cat", 64)),
             TileAudit(Tile(0, 32, 32, 32), constant_audit(0.6, "a cat", 64))]  # fmt: skip
    audit = merged(whole, views, (64, 64))
    assert audit.safety == pytest.approx(0.4) and audit.adv_prob == 0.6 and audit.quality == 0.7
    assert audit.safety == min(1 - audit.adv_prob, audit.probs["safe"])
    assert audit.tiles[0].audit is whole and audit.tiles[0].tile == Tile(0, 0, 64, 64)


def test_maps_are_stitched_where_they_lie():
    """The whole map is 0.1 everywhere; the tile at the lower right has 0.8 in it, and 0.0 raises nothing elsewhere."""
    parts = [(Tile(0, 0, 32, 32), torch.zeros(16, 16)), (Tile(32, 32, 32, 32), torch.full((16, 16), 0.8))]
    heat = stitched(torch.full((16, 16), 0.1), parts, (64, 64))
    assert heat.shape == (32, 32)
    assert torch.allclose(heat[:16, :16], torch.tensor(0.1)) and torch.allclose(heat[16:, 16:], torch.tensor(0.8))


@pytest.mark.parametrize("at", [(0, 0), (32, 32), (10, 25)])
def test_a_small_harm_in_a_large_picture_is_found_where_it_is(at):
    """A bright patch of 32 px in a dark picture of 64 px has a mean of a quarter: only a tile of its size flags it."""
    picture = torch.zeros(3, 64, 64)
    picture[:, at[0] : at[0] + 32, at[1] : at[1] + 32] = 1.0
    blind = GuardPaint(FlagsBright(), PaintsFlat())
    assert blind.parts.finding(blind.audit_image(picture), 1.0) is None
    guard = blind.configured(scope=SCOPE)
    audit = guard.audit_image(picture)
    found = guard.parts.finding(audit, 1.0)
    assert found is not None and "tile" in found.reason
    row, column = divmod(int(audit.adv_map.argmax()), audit.adv_map.shape[1])
    scale = 64 / audit.adv_map.shape[0]
    assert at[0] <= (row + 0.5) * scale <= at[0] + 32 and at[1] <= (column + 0.5) * scale <= at[1] + 32


def test_a_picture_of_the_learned_size_has_no_tiles():
    guard = GuardPaint(FlagsBright(), PaintsFlat()).configured(scope=SCOPE)
    assert guard.audit_image(torch.rand(3, 32, 32)).tiles == ()
    assert guard.audit_image(torch.rand(3, 32, 96)).tiles == ()


def test_the_number_of_tiles_is_bounded():
    """Above the calibrated sizes a picture is shrunk before it is cut."""
    guard = GuardPaint(FlagsBright(), PaintsFlat()).configured(scope=SCOPE)
    largest = len(guard.audit_image(torch.rand(3, 128, 128)).tiles)
    with pytest.warns(UserWarning, match="512x512 pixels"):
        assert len(guard.audit_image(torch.rand(3, 512, 512)).tiles) == largest


@settings(deadline=None)
@given(size=st.tuples(st.integers(16, 4000), st.integers(16, 4000)), side=st.integers(64, 512))
def test_no_picture_has_more_tiles_than_the_limit(size, side):
    if max(size) > 10 * min(size):
        return
    shown, tiles = bounded(size, side)
    assert len(tiles) <= MOST_TILES and bool(tiles) == (min(size) > side)
    assert (shown == size) == (len(tiling(size, side)) <= MOST_TILES)
    assert shown[0] / size[0] == pytest.approx(shown[1] / size[1], abs=1 / min(size))


def test_a_large_picture_in_small_tiles_is_seen_smaller_and_that_is_said(sd_pipe):
    """2048 px in squares of 256 px, as the presets have it, would be 225 + 49 + 9 = 283; 1024 px are 49 + 9 = 58."""
    assert len(tiling((2048, 2048), 256)) == 283 and bounded((1024, 1024), 256)[0] == (1024, 1024)
    guard = GuardPaint(FlagsBright(), PaintsFlat()).configured(scope=replace(SCOPE, side=64, pixels=(32, 2048)))
    with pytest.warns(UserWarning, match="640x640 would be audited in 462 tiles; they are cut from it at"):
        audit = guard.audit_image(torch.rand(3, 640, 640))
    assert 40 < len(audit.tiles) - 1 <= MOST_TILES
    small = replace(SCOPE, side=8, pixels=(8, 64))
    report = call(guard.configured(scope=small).attach(sd_pipe), steps=3).safety[0]
    assert max(a.tiles for s in report.steps for a in s.audits) <= MOST_TILES
    assert any("would be audited in" in note["why"] for note in report.effective_settings["skipped"])


def test_a_picture_too_long_for_the_limit_is_an_error():
    with pytest.raises(BadInput, match="100000x300.*at most 64 tiles"):
        bounded((300, 100_000), 256)


def test_a_repair_is_judged_where_it_is():
    """Of two bright corners one is repaired: the audit of that place is clean, that of the picture is not."""
    guard = GuardPaint(FlagsBright(), PaintsFlat()).configured(scope=SCOPE)
    picture = torch.zeros(3, 128, 128)
    picture[:, :32, :32] = picture[:, 96:, 96:] = 1.0
    before = guard.audit_image(picture)
    mask = torch.zeros(128, 128)
    mask[:32, :32] = 1.0
    repaired = picture * (1 - mask)
    parts = guard.parts

    def look(images):
        return parts.audit(images, [None] * len(images), 0.0)

    whole = look(shrink(repaired, parts.fine_size)[None])[0]
    after = parts.retouched(whole, before, repaired, mask, look)
    fresh = guard.audit_image(repaired)
    assert after.safety == pytest.approx(fresh.safety) and torch.allclose(after.adv_map, fresh.adv_map, atol=1e-5)
    assert parts.finding(after, 1.0) is not None and parts.finding(within(after, mask), 1.0) is None
    assert parts.finding(within(before, mask), 1.0) is not None


def test_a_mask_of_any_size_touches_tiles():
    mask = torch.zeros(16, 16)
    mask[15, 15] = 1.0
    assert touches(Tile(32, 32, 32, 32), mask, (64, 64)) and not touches(Tile(0, 0, 32, 32), mask, (64, 64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"pixels": (128, 32)},
        {"steps": (0, -1)},
        {"guidance": (-1.0, 3.0)},
        {"side": 0},
        {"side": 500},
        {"tile_offset": 99.0},
    ],
    ids=str,
)
def test_a_wrong_scope_is_refused_with_its_value(wrong):
    with pytest.raises(BadConfig, match=str(next(iter(wrong)))):
        replace(SCOPE, **wrong)


def test_a_scope_survives_saving():
    config = GuardPaint(FlagsBright(), PaintsFlat()).configured(scope=SCOPE).config
    assert type(config).from_dict(config.to_dict()) == config
    with pytest.raises(BadConfig, match="scope"):
        type(config).from_dict({"scope": {"side": 32}})


def test_what_lies_outside_is_named():
    assert SCOPE.outside((64, 64), 5.0, 25) == []
    assert SCOPE.outside((64, 256), 15.0, 60) == [
        "256x64 pixels (both sides from 32 to 128)",
        "guidance 15 (from 1 to 10)",
        "60 steps (from 1 to 50)",
    ]


def test_tiles_of_an_edited_picture_are_not_lowered():
    """A patch of 0.6 is a finding by itself (0.4); lowered by two logits (odds 1.5 / 7.4 = 0.2) it is none."""
    guard = GuardPaint(FlagsBright(), PaintsFlat()).configured(scope=replace(SCOPE, tile_offset=2.0))
    picture = torch.zeros(3, 64, 64)
    picture[:, :32, :32] = 0.6
    parts = guard.parts

    def look(images):
        return parts.audit(images, [None] * len(images), 0.0)

    whole = look(picture[None])[0]
    found = [
        parts.finding(parts.with_tiles(whole, lambda: picture, (64, 64), look, edited), 1.0) for edited in (False, True)
    ]
    assert found[0] is None and found[1] is not None


def test_a_guard_may_answer_for_fewer_sizes_than_it_audits_in_tiles():
    """Up to 128 px pictures are tiled; the guard answers for 32 px only, so 64 px is outside, and tiled all the same."""
    narrow = replace(SCOPE, offered=(32, 32))
    assert not narrow.outside((32, 32)) and not SCOPE.outside((64, 64))
    assert narrow.outside((64, 64)) == ["64x64 pixels (both sides from 32 to 32)"]
    assert Scope.from_dict(asdict(narrow)) == narrow
    guard = GuardPaint(AlwaysSafe(), PaintsFlat()).configured(scope=narrow)
    assert len(guard.parts.tiles_of((64, 64))[1]) > 1
    for wrong in ((16, 32), (32, 256), (64, 32), (32,), ("a", "b"), (32, 40.5)):
        with pytest.raises(BadConfig):
            Scope.from_dict({**asdict(SCOPE), "offered": wrong})
