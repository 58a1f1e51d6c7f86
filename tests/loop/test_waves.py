"""Waves and regions painted together: fewer candidates, the same rules; with limits that nothing reaches, the same pictures."""

from __future__ import annotations

from dataclasses import replace

import jsonschema
import pytest
import torch
import yaml
from helpers import bright_guard, call
from hypothesis import given
from hypothesis import strategies as st

from guardpaint.audit.regions import soft_mask
from guardpaint.cli.audit import tournament_story
from guardpaint.config import GuardConfig
from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.loop.regions import apart
from guardpaint.loop.report import report_schema
from guardpaint.policy import Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.knobs import FixedProposer
from guardpaint.repair.ranker import Ranker
from guardpaint.serve.disclosure import tournament_for_owner
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright
from guardpaint.types import Region
from guardpaint.verify.tournament import wave_parts

BLOCK = replace(Policy.default(), last_resort=("block",))


class Shades:
    """Paints candidate k in a shade of its own, from dark grey (0) to black (9), whoever competes; counts candidates."""

    name = "shades"

    def __init__(self):
        self.painted: list[int] = []

    def candidates(self, request):
        self.painted.append(len(request.knobs))
        shades = torch.tensor([0.2 - k.seed_offset / 4500 for k in request.knobs]).view(-1, 1, 1, 1)
        return shades.expand(len(request.knobs), *request.view.shape).clone()


class Together(Shades):
    """The same, with shared passes, which it counts."""

    def __init__(self):
        super().__init__()
        self.passes: list[int] = []

    def together(self, requests):
        self.passes.append(len(requests))
        return [self.candidates(r) for r in requests]


def guarded(pipe, prompt="a quiet street", repairer=None, **config):
    repairer = repairer or Shades()
    guard = bright_guard(1.6, repairer, FixedProposer(), f_gate="off", p_gate="off", **config)
    guard.parts = replace(guard.parts, policy=BLOCK)
    out = call(guard.attach(pipe), prompt, steps=5)
    for report in out.safety:
        jsonschema.validate(report.to_dict(), report_schema())
    return out, repairer


def tournaments(report):
    return [t for step in report.steps for t in step.tournaments]


@given(count=st.integers(1, 64), first=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_waves_paint_every_candidate_once(count, first):
    parts = wave_parts("+".join(map(str, first)), count)
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    assert wave_parts("off", count) == [slice(0, count)]


def test_waves_by_hand():
    assert wave_parts("1", 5) == [slice(0, 1), slice(1, 5)]
    assert wave_parts("1+2", 5) == [slice(0, 1), slice(1, 3), slice(3, 5)]
    assert wave_parts("8", 5) == [slice(0, 5)]


def test_waves_in_files_and_wrong_ones():
    assert GuardConfig.from_dict(yaml.safe_load("{waves: off}")).waves == "off"
    assert GuardConfig.from_dict(yaml.safe_load("{waves: 2}")).waves == "2"
    assert GuardConfig.from_dict(yaml.safe_load("{waves: 1+2}")).waves == "1+2"
    for wrong in ("0", "1+", "five", "100", "-1", "1 + 2"):
        with pytest.raises(BadConfig, match="waves"):
            GuardConfig(waves=wrong)


def test_a_limit_that_nothing_reaches_gives_the_papers_tournament(pipe):
    plain, once = guarded(pipe)
    waved, twice = guarded(pipe, waves="1+2", wave_safety=1.0, wave_margin=1.0)
    assert torch.equal(plain.images, waved.images)
    own, theirs = (tournaments(o.safety[0]) for o in (plain, waved))
    assert own and [t.winner for t in own] == [t.winner for t in theirs]
    for a, b in zip(own, theirs, strict=True):
        for one, other in zip(a.candidates, b.candidates, strict=True):
            assert one.knobs == other.knobs and one.scores == pytest.approx(other.scores, abs=1e-4)
    assert once.painted[0] == 5 and twice.painted[:3] == [1, 2, 2] and theirs[0].waves == [1, 2, 2]
    assert own[0].waves == []


def test_a_first_candidate_that_is_good_enough_ends_the_tournament(pipe):
    out, repairer = guarded(pipe, waves="1", wave_safety=0.0)
    first = tournaments(out.safety[0])[0]
    assert repairer.painted[0] == 1 and first.waves == [1] and first.winner == 0
    assert len(first.candidates) == 5 and all(not c.scores for c in first.candidates[1:])
    assert "1 of 5 candidates; one was good enough" in out.safety[0].to_html()


def test_a_margin_above_the_gates_counts_too(sd_pipe):
    """The double's P and F are 0.9: at progress 1 they are 0.25 and 0.35 above their gates."""

    def painted(margin):
        guard = bright_guard(1.6, Shades(), FixedProposer(), waves="1", wave_safety=0.0, wave_margin=margin)
        out = call(guard.attach(sd_pipe), steps=5)
        return tournaments(out.safety[0])[0].waves

    assert painted(0.2) == [1] and painted(0.4) == [1, 4]


def square(top, left, size, side=128):
    mask = torch.zeros(side, side, dtype=torch.bool)
    mask[top : top + size, left : left + size] = True
    return Region(mask, float(mask.float().mean()), 1.0)


@given(places=st.lists(st.tuples(st.integers(0, 108), st.integers(0, 108), st.integers(4, 20)), min_size=1, max_size=6))
def test_groups_touch_no_common_pixel_and_hold_every_region(places):
    regions = [square(*place) for place in places]
    groups = apart(regions)
    assert sorted(k for group in groups for k, _ in group) == list(range(len(regions)))
    for group in groups:
        widest = [soft_mask(r.mask, 1.0, 1.0) > 0 for _, r in group]
        assert int(torch.stack(widest).int().sum(0).max()) <= 1
    assert groups[0][0][0] == 0


class TwoLamps(FlagsBright):
    """Harm is the brighter of two corners, so that a repair of one alone helps nothing until the other is dark."""

    def audit(self, images, prompts, noise):
        spots = torch.zeros_like(images)
        s = images.shape[-1] // 4
        spots[..., :s, :s] = images[..., :s, :s]
        spots[..., -s:, -s:] = images[..., -s:, -s:]
        found = FlagsBright.audit(self, spots, prompts, noise)
        worst = [float(max(i[:, :s, :s].mean(), i[:, -s:, -s:].mean())) for i in spots]
        return [
            replace(a, adv_prob=w, safety=1 - w, suppression=1 - w, probs={"safe": 1 - w, "nudity": w, "violence": 0.0})
            for a, w in zip(found, worst, strict=True)
        ]


def lamps(pipe, repairer, **config):
    ranker = Ranker() if config.get("keep") else None
    guard = GuardPaint(TwoLamps(1.6), repairer, FixedProposer(), ranker=ranker, policy=replace(BLOCK, trigger=0.15))
    guard = guard.configured(
        f_gate="off", p_gate="off", mask_threshold="calibrated", mask_level=0.05, regions=2, **config
    )
    return call(guard.attach(pipe), steps=5, seed=3).safety[0]


def test_regions_that_are_apart_share_a_pass(sd_pipe):
    repairer = Together()
    report = lamps(sd_pipe, repairer, regions_together="on")
    step = next(s for s in report.steps if s.tournaments)
    assert step.regions == 2 and repairer.passes[0] == 2
    names = [t.region for t in step.tournaments]
    assert names[:2] == ["1", "2"]
    jsonschema.validate(report.to_dict(), report_schema())


def test_what_is_painted_is_tried_on_all_regions_before_their_union_is(sd_pipe):
    """Neither lamp can be repaired alone; the sequence paints regions and union, together paints regions alone."""
    one, other = Shades(), Together()
    in_turn = lamps(sd_pipe, one, delta=0.2)
    together = lamps(sd_pipe, other, regions_together="on", delta=0.2)
    first, second = (next(s for s in r.steps if s.tournaments) for r in (in_turn, together))
    if [t.winner for t in first.tournaments[:2]] == [None, None]:
        assert [t.region for t in first.tournaments] == ["1", "2", "union"]
        assert [t.region for t in second.tournaments] == ["1", "2", "all"]
        assert second.tournaments[-1].winner is not None
        assert sum(other.painted[:2]) == 10 and sum(one.painted[:3]) == 15
    else:
        pytest.fail("the double must need both regions: change the scene")


def test_pictures_of_a_batch_share_passes_and_are_those_of_each_alone(pipe):
    prompts = ["a quiet street", "a red flower", "a tall house"]
    repairer = Together()
    out, _ = guarded(pipe, prompts, repairer, regions=1)
    assert max(repairer.passes, default=0) >= 2
    assert all(tournaments(report) for report in out.safety)


def test_a_batch_repairs_each_picture_as_if_it_were_alone():
    """With a real inpainter, up to float rounding."""
    pipe = small.pipeline("sd")
    guard = GuardPaint(FlagsBright(1.6), small.inpainter(), FixedProposer(), policy=BLOCK)
    guard = guard.configured(f_gate="off", p_gate="off", candidates=2)
    twin, prompts = guard.attach(pipe), ["a quiet street", "a red flower"]
    gens = [torch.Generator().manual_seed(s) for s in (5, 6)]
    both = call(twin, prompts, generator=gens).images
    for i, prompt in enumerate(prompts):
        alone = call(twin, prompt, generator=[torch.Generator().manual_seed(5 + i)]).images
        torch.testing.assert_close(both[i : i + 1], alone, atol=2e-3, rtol=0)


def test_regions_together_with_an_inpainter_of_another_size(sd_pipe):
    """Its pictures are smaller than the view: they are resized before they are composed."""
    guard = GuardPaint(TwoLamps(1.6), small.inpainter(), FixedProposer(), policy=replace(BLOCK, trigger=0.15))
    guard = guard.configured(
        f_gate="off", p_gate="off", mask_threshold="calibrated", mask_level=0.05, regions=2, delta=0.2,
        regions_together="on", candidates=2,
    )  # fmt: skip
    guard.parts.repairer.native = 64
    report = call(guard.attach(sd_pipe), steps=5, seed=3, height=128, width=128).safety[0]
    names = [t.region for s in report.steps for t in s.tournaments]
    assert not report.errors and "1" in names


def test_waves_of_regions_decide_anew_with_all_that_is_painted(sd_pipe):
    """Nothing is good enough: after the last wave each region has one tournament of all candidates, as without waves."""
    plain = lamps(sd_pipe, Together(), regions_together="on")
    waved = lamps(sd_pipe, Together(), regions_together="on", waves="1+2", wave_safety=1.0, wave_margin=1.0)
    first, second = (next(s for s in r.steps if s.tournaments) for r in (plain, waved))
    assert [(t.region, t.winner) for t in first.tournaments] == [(t.region, t.winner) for t in second.tournaments]
    assert [t.waves for t in second.tournaments if t.region in "12"] == [[1, 2, 2]] * 2
    assert first.cost["candidates"] == second.cost["candidates"]


def test_with_a_ranker_regions_go_in_turn_and_the_report_says_so(sd_pipe):
    report = lamps(sd_pipe, Together(), regions_together="on", keep=3)
    assert any("in turn, because `keep`" in note for s in report.steps for note in s.notes)
    quiet = lamps(sd_pipe, Together(), regions_together="on")
    assert not any("in turn" in note for s in quiet.steps for note in s.notes)


def test_what_is_tried_on_all_regions_counts_as_painted_once(sd_pipe):
    repairer = Together()
    report = lamps(sd_pipe, repairer, regions_together="on", delta=0.2)
    assert sum(s.cost["candidates"] for s in report.steps) == sum(repairer.painted)


def test_what_waves_left_out_is_told_as_such(pipe):
    """Not as left out by a ranker: in the command's story and in what owners see."""
    report = guarded(pipe, waves="1", wave_safety=0.0)[0].safety[0].to_dict()
    first = next(t for s in report["steps"] for t in s["tournaments"])
    assert "4 not painted, because one was good enough" in tournament_story(first)
    assert tournament_for_owner(first)["waves"] == [1]


def test_a_fixed_guidance_is_said(sd_pipe):
    """The guidance knob changes nothing then."""
    guard = GuardPaint(FlagsBright(), Inpainter(small.inpainter().pipe, steps=4, guidance=1.0), policy=BLOCK)
    skipped = call(guard.attach(sd_pipe), steps=2).safety[0].effective_settings["skipped"]
    assert {"what": "knob cfg", "why": "the repairer's guidance is 1 for every candidate"} in skipped
