"""Thresholds hold for views like those they were calibrated on: views are made as the loop makes them, and compared."""

from __future__ import annotations

import pytest
import torch
from helpers import bright_guard, call

from guardpaint.config import Band, Calibration
from guardpaint.data.views import KINDS, Labelled, Steps, ViewedBase, joined, load_views, stacked, store
from guardpaint.draft.codec import resize
from guardpaint.errors import BadConfig
from guardpaint.evaluate.calibrate import Looks, glance_threshold
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat
from guardpaint.types import Level


@pytest.fixture(scope="module")
def tiny():
    return small.tiny_decoder(4)


def thresholds(*views):
    return Calibration(0.1, 0.1, "", (Band(0.0, {}, None, {}),), views=tuple(views))


def guard_with(tiny, calibration):
    return GuardPaint(FlagsBright(0.1), PaintsFlat(), decoders={"sd": tiny}).configured(calibration=calibration)


def made_by(tiny, pipe):
    """The views that a guard with this decoder makes of 64 px pictures."""
    return call(guard_with(tiny, None).attach(pipe)).safety[0].effective_settings["views"]


def test_thresholds_of_other_views_are_refused(tiny, sd_pipe):
    views = made_by(tiny, sd_pipe)
    assert views["calibrated_on"] is None
    report = call(guard_with(tiny, thresholds(*views["made_by"])).attach(sd_pipe)).safety[0]
    assert report.effective_settings["views"]["calibrated_on"] == views["made_by"]
    assert not report.effective_settings["skipped"]
    for other in ("full", "tiny 000000000000", "exit 1/2 000000000000"):
        with pytest.raises(BadConfig, match="calibrated on views by"):
            guard_with(tiny, thresholds(other)).attach(sd_pipe)
    with pytest.raises(BadConfig, match="calibrated on views by"), guard_with(tiny, thresholds("full")).watch(sd_pipe):
        pass
    plain = bright_guard(0.1, calibration=thresholds(*views["made_by"]))
    with pytest.raises(BadConfig, match="makes views by full"):
        plain.attach(sd_pipe)
    guard_with(tiny, thresholds("full")).configured(view_decoder="full").attach(sd_pipe)


def test_another_size_of_picture_is_said(tiny, sd_pipe):
    """The coarse view of a larger picture comes from an earlier exit than those that were calibrated on."""
    views = made_by(tiny, sd_pipe)["made_by"]
    twin = guard_with(tiny, thresholds(*views)).attach(sd_pipe)
    with pytest.warns(UserWarning, match="not calibrated on: exit 1/4"):
        report = call(twin, height=128, width=128).safety[0]
    assert any("exit 1/4" in s["why"] for s in report.effective_settings["skipped"])


def test_thresholds_of_an_earlier_version_are_as_they_were(tiny, sd_pipe):
    """No record of views: the guard is attached, and the settings say that they are unrecorded."""
    old = {k: v for k, v in thresholds().to_dict().items() if k != "views"}
    calibration = Calibration.from_dict(
        {**old, "bands": [{"start": 0.0, "thresholds": {}, "mask_level": None, "n": {}}]}
    )
    report = call(guard_with(tiny, calibration).attach(sd_pipe)).safety[0]
    assert report.effective_settings["views"]["calibrated_on"] == "unrecorded" and report.status == "clean"


def test_a_calibration_keeps_its_record(tiny):
    calibration = thresholds("exit 1/2 abc", "tiny def")
    assert Calibration.from_dict(calibration.to_dict()) == calibration


def pictures(n):
    zeros = torch.zeros(n)
    return Labelled(
        torch.zeros(n, 3, 64, 64),
        torch.zeros(n, 1, 1, dtype=torch.bool),
        zeros.long(),
        list(range(n)),
        ["a"] * n,
        ("safe",),
    )


def views_by(base, z):
    level = Level(1.0, 0.0, 0.0)
    taken = Steps([level] * len(z), [level] * len(z), torch.ones(len(z)))
    return stacked(base, pictures(len(z)), {"x0": z}, taken, torch.Generator().manual_seed(0))


def test_corpus_views_are_made_like_the_loops(tiny, sd_pipe, tmp_path):
    """A guard looks at 32 px by an exit and at 64 px by the whole decoder; so do views by the tiny decoder."""
    z = torch.randn(6, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    base = ViewedBase(sd_pipe, {}, tiny, looks=(32, 64))
    with torch.no_grad():
        views = views_by(base, z)
        wanted = base.decoder.at(z, 32)
    own = views.decoder.bool()
    assert own.any() and not own.all() and set(views.smaller) == {32}
    assert (views.at(32)[own] - wanted[own]).abs().max() <= 1 / 255
    assert (
        torch.equal(views.at(32)[~own], (resize(views.images[~own].float() / 255, (32, 32)) * 255).round() / 255)
        or (views.at(32)[~own] - resize(views.images[~own].float() / 255, (32, 32))).abs().max() <= 1 / 255
    )
    assert set(views.ways) == {"full", *made_by(tiny, sd_pipe)["made_by"]}
    store([views], tmp_path / "v.pt")
    again = load_views(tmp_path / "v.pt", on_disk=True)
    assert torch.equal(again.rows(torch.tensor([2, 0])).at(32), views.at(32)[[2, 0]]) and again.ways == views.ways
    clean = pictures(2).views(torch.rand(2, 3, 64, 64), KINDS[0])
    both = joined([views, clean])
    assert both.smaller[32].shape == (8, 3, 32, 32) and both.ways == views.ways


def test_without_a_tiny_decoder_views_are_full(sd_pipe):
    with torch.no_grad():
        views = views_by(ViewedBase(sd_pipe, {}), torch.randn(2, 4, 16, 16))
    assert views.ways == ("full",) and not views.smaller


def test_glances_are_calibrated_by_hand():
    """Nine unsafe views with adv_prob 0.1 … 0.9 at a glance, α = 0.2: one more than (9 + 1)·0.2 = 2 may not be missed.

    A corrected mean of at most 0.2 allows (m + 1)/10 ≤ 0.2, so m = 1 miss: the limit lies above 0.1 and at most at 0.2.
    """
    policy = Policy.default()
    audit = FlagsBright().audit(torch.zeros(1, 3, 8, 8), [None], 0.0)[0]
    from dataclasses import replace

    policy = replace(policy, trigger=1.0)
    looks = [Looks(audit, audit, replace(audit, adv_prob=k / 10)) for k in range(1, 10)]
    limit = glance_threshold(looks, policy, 0.2, "views")
    assert limit == pytest.approx(0.2)
    assert glance_threshold([Looks(audit, audit)], policy, 0.2, "views") is None
