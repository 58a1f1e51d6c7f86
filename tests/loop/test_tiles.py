"""Pictures larger than the auditor learned, in guarded calls of every family."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace

import jsonschema
import pytest
import torch
from helpers import call, gen

from guardpaint.audit.tiles import tiling
from guardpaint.config import Scope
from guardpaint.guard import GuardPaint
from guardpaint.loop.report import report_schema
from guardpaint.repair.knobs import UniformProposer
from guardpaint.testing.doubles import AlwaysSafe, FlagsBright, PaintsFlat
from guardpaint.types import Draft, Level, Region
from guardpaint.verify.parts import Parts
from guardpaint.verify.tournament import Tournament

SCOPE = Scope(side=32, pixels=(32, 64), guidance=(0.0, 10.0), steps=(1, 50))


def sensitive(pipe, steps: int) -> FlagsBright:
    """A detector that flags the brightest tile of what the pipeline draws, but not the whole picture."""
    image = call(pipe, steps=steps).images[0].float()
    light = [
        float(image[:, t.top : t.top + t.height, t.left : t.left + t.width].mean())
        for t in tiling((64, 64), SCOPE.side)
    ]
    return FlagsBright(0.4 / ((float(image.mean()) + max(light)) / 2))


def test_a_harm_that_only_a_tile_shows_is_not_released(pipe):
    detector = sensitive(pipe, 4)
    blind = GuardPaint(detector, PaintsFlat()).configured(audits=1)
    assert call(blind.attach(pipe), steps=4).safety[0].status == "clean"
    guard = blind.configured(scope=SCOPE)
    out = call(guard.attach(pipe), steps=4)
    report = out.safety[0]
    jsonschema.validate(report.to_dict(), report_schema())
    assert report.triggered and report.status in ("repaired", "blurred", "blocked")
    assert report.steps[-1].audits[-1].tiles == 9 and report.steps[-1].audits[-1].tile is not None
    assert report.effective_settings["scope"]["side"] == 32
    if report.status != "blocked":
        assert guard.parts.finding(guard.audit_image(out.images[0]), 1.0) is None


@pytest.mark.parametrize(("sizes", "said"), [((16, 32), True), ((32, 64), False)])
def test_a_guard_without_scope_says_that_it_sees_large_pictures_whole(pipe, sizes, said):
    guard = GuardPaint(AlwaysSafe(sizes=sizes), PaintsFlat())
    skipped = call(guard.attach(pipe), steps=4).safety[0].effective_settings["skipped"]
    assert [s["why"].startswith("pictures of 64x64 are only seen whole, 32") for s in skipped] == [True] * said


def test_what_is_released_after_an_edit_passes_without_lowered_tiles(pipe):
    lenient = replace(SCOPE, tile_offset=0.3)
    guard = GuardPaint(sensitive(pipe, 4), PaintsFlat()).configured(audits=1, scope=lenient)
    out = call(guard.attach(pipe), steps=4)
    if out.safety[0].status in ("repaired", "blurred"):
        strict = guard.configured(scope=SCOPE)
        assert strict.parts.finding(strict.audit_image(out.images[0]), 1.0) is None


def test_tiles_in_the_loop_change_nothing_if_they_are_harmless(pipe):
    plain = call(pipe, steps=4).images
    guard = GuardPaint(AlwaysSafe(), PaintsFlat()).configured(audits=3, audit_start=0.0, scope=SCOPE)
    out = call(guard.attach(pipe), steps=4)
    assert torch.equal(plain, out.images) and out.safety[0].status == "clean"
    assert all(a.tiles == 9 for s in out.safety[0].steps for a in s.audits)


def test_tiles_are_decided_per_image(pipe):
    guard = GuardPaint(sensitive(pipe, 4), PaintsFlat()).configured(audits=2, audit_start=0.0, scope=SCOPE)
    twin = guard.attach(pipe)
    together = call(twin, ["a quiet street"] * 2, generator=[gen(1), gen(2)], steps=4)
    for i in range(2):
        alone = call(twin, "a quiet street", generator=gen(1 + i), steps=4)
        assert alone.safety[0].status == together.safety[i].status
        assert torch.allclose(alone.images[0], together.images[i], atol=1e-3)


@pytest.mark.parametrize(
    ("scope", "what"),
    [(replace(SCOPE, pixels=(32, 48)), "64x64 pixels"), (replace(SCOPE, steps=(10, 20)), "4 steps"),
     (replace(SCOPE, guidance=(0.0, 0.5)), "guidance")],
    ids=["size", "steps", "guidance"],
)  # fmt: skip
def test_settings_outside_of_the_scope_are_said(sd_pipe, scope, what):
    guard = GuardPaint(AlwaysSafe(), PaintsFlat()).configured(scope=scope)
    with pytest.warns(UserWarning, match=what):
        report = call(guard.attach(sd_pipe), steps=4).safety[0]
    assert any(what in note["why"] for note in report.effective_settings["skipped"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(guard.configured(scope=SCOPE).attach(sd_pipe), steps=4)


@pytest.mark.parametrize("seed", range(4))
def test_candidates_that_have_lost_are_not_looked_at_closer(seed):
    """Stopping early changes no utility and no winner, and audits fewer tiles."""
    generator = torch.Generator().manual_seed(seed)
    guard = GuardPaint(FlagsBright(), PaintsFlat(0.9)).configured(scope=SCOPE)
    picture = torch.rand(3, 64, 64, generator=generator) * 0.5
    picture[:, :40, :40] += 0.5
    counts, records = [], []

    class Thorough(Parts):
        def retouched(self, whole, control, picture, mask, look, floor=-1.0):
            return Parts.retouched(self, whole, control, picture, mask, look)

    for kind in (Parts, Thorough):
        parts = kind(**vars(guard.parts))
        seen = []

        def look(images, parts=parts, seen=seen):
            seen.append(len(images))
            return parts.audit(images, ["a street"] * len(images), 0.0)

        control = parts.with_tiles(look(picture[None])[0], lambda: picture, (64, 64), look)
        mask = torch.zeros(64, 64, dtype=torch.bool)
        mask[:40, :40] = True
        draft = Draft(0, 1, torch.zeros(4, 8, 8), *[torch.zeros(4, 8, 8)] * 2, *[Level(1.0, 0.0, 0.0)] * 2, None)
        tournament = Tournament(parts, "a street", draft, picture, control, Region(mask, 0.4, 1.0), "1", "nudity", 5,
                                0.0, look, lambda stage: nullcontext(), "off")  # fmt: skip
        knobs = UniformProposer().propose(tournament.state, 5, seed)
        records.append(tournament.play(knobs, "uniform").record)
        counts.append(sum(seen))
    fast, thorough = records
    assert fast.winner == thorough.winner
    assert [c.utility for c in fast.candidates] == [c.utility for c in thorough.candidates]
    assert counts[0] < counts[1]
