"""Glances: a coarse look at every step that is not audited. It may schedule an audit, and it decides nothing."""

from __future__ import annotations

import jsonschema
import pytest
import torch
from helpers import bright_guard, call, captured, gen

from guardpaint.config import Band, Calibration, GuardConfig
from guardpaint.errors import BadConfig
from guardpaint.loop.report import report_schema
from guardpaint.testing import small


def report_of(guard, pipe, **more):
    out = call(guard.attach(pipe), steps=8, **more)
    return out.safety[0], out


@pytest.mark.parametrize("start", [0.0, 0.4])
def test_glances_that_never_trigger_change_nothing(pipe, start):
    plain = call(pipe, steps=8).images
    report, out = report_of(bright_guard(0.1, glance_from=start), pipe)
    assert torch.equal(out.images, plain) and report.status == "clean"
    steps = [g.step for g in report.glances]
    first = 0 if start == 0 else 3  # progress of step 3 of 8 is 0.5
    assert steps == list(range(first, 6)) and not any(g.scheduled for g in report.glances)
    assert [s.step for s in report.steps] == [6, 7], "only the last two steps are audited, as without glances"
    settings = report.effective_settings["glances"]
    assert settings == {"from": start, "pixels": 18, "made": len(steps), "scheduled": 0}
    jsonschema.validate(report.to_dict(), report_schema())


def test_glances_are_off_by_default(sd_pipe):
    report, _ = report_of(bright_guard(0.1), sd_pipe)
    assert GuardConfig().glance_from is None
    assert report.glances == [] and report.effective_settings["glances"] is None


def test_a_glance_schedules_an_audit_of_the_same_step(sd_pipe):
    report, _ = report_of(bright_guard(1.0, glance_from=0.5), sd_pipe)
    first = report.steps[0]
    assert first.step == 3 and first.triggered and first.cost["glances"] == 1
    assert "audited because of a glance at this step" in first.notes
    assert report.glances[0].step == 3 and report.glances[0].scheduled
    assert report.effective_settings["glances"]["scheduled"] == sum(g.scheduled for g in report.glances)
    jsonschema.validate(report.to_dict(), report_schema())


def test_a_picture_that_cannot_be_glanced_at_fails_alone(sd_pipe):
    """The view of the first picture holds NaN, at the glance and at the audit of the same step."""
    guard = bright_guard(0.1, glance_from=0.5)
    plain = call(sd_pipe, ["one", "two"], steps=8).images
    decodes = []

    def spoil(module, args, output):
        decodes.append(len(output))
        if len(decodes) <= 2:
            output[0] = float("nan")

    handle = sd_pipe.vae.decoder.conv_out.register_forward_hook(spoil)
    out = call(guard.attach(sd_pipe), ["one", "two"], steps=8)
    handle.remove()
    assert decodes[:2] == [2, 1] and [r.status for r in out.safety] == ["blocked", "clean"]
    assert "NaN" in out.safety[0].errors[0] and torch.equal(out.images[1], plain[1])


def test_a_glance_never_decides(sd_pipe):
    """Its limit is 0, so that every glance schedules an audit; the audits find nothing, and nothing changes."""
    calibration = Calibration(0.1, 0.1, "", (Band(0.0, {}, None, {}, glance=0.0),))
    report, out = report_of(bright_guard(0.1, glance_from=0.0, calibration=calibration), sd_pipe)
    assert torch.equal(out.images, call(sd_pipe, steps=8).images) and report.status == "clean"
    assert [s.step for s in report.steps] == list(range(8)) and not any(s.triggered for s in report.steps)
    assert all(g.scheduled for g in report.glances) and len(report.glances) == 6


def test_the_limit_is_the_trigger_minus_the_band_unless_it_is_calibrated():
    guard = bright_guard(band=0.15, glance_from=0.4)
    assert guard.parts.glance_trigger(0.5) == pytest.approx(guard.policy.trigger - 0.15)
    bands = (Band(0.0, {}, None, {}, glance=0.2), Band(0.7, {}, None, {}))
    own = guard.configured(calibration=Calibration(0.1, 0.1, "", bands))
    assert own.parts.glance_trigger(0.5) == 0.2
    assert own.parts.glance_trigger(0.8) == pytest.approx(guard.policy.trigger - 0.15)


def test_only_the_images_that_a_glance_found_are_audited(sd_pipe, monkeypatch):
    from guardpaint.loop import glance

    guard = bright_guard(0.1, glance_from=0.5)
    calls = captured(guard)
    count = iter(range(100))
    monkeypatch.setattr(glance, "scheduled", lambda *_: next(count) == 1)  # the second image, at the first glance
    twin = guard.attach(sd_pipe)
    out = call(twin, ["a quiet street"] * 2, steps=8, generator=[gen(1), gen(2)])
    assert [[s.step for s in r.steps] for r in out.safety] == [[6, 7], [3, 6, 7]]
    assert calls[0].state.audited == {3, 6, 7}


def test_an_error_at_a_glance_fails_closed(sd_pipe, monkeypatch):
    from guardpaint.loop import glance

    def broken(*_):
        raise RuntimeError("no look")

    monkeypatch.setattr(glance, "scheduled", broken)
    report, _ = report_of(bright_guard(0.1, glance_from=0.5), sd_pipe)
    assert report.status == "blocked" and "no look" in report.errors[0]


def test_monitor_glances_too_and_off_does_not(sd_pipe):
    report, _ = report_of(bright_guard(1.0, glance_from=0.5, mode="monitor"), sd_pipe)
    assert report.steps[0].step == 3 and report.status == "released_flagged"
    report, _ = report_of(bright_guard(1.0, glance_from=0.5, mode="off"), sd_pipe)
    assert report.glances == []


def test_a_glance_comes_from_an_early_exit(sd_pipe):
    """Small decoders enlarge fourfold: 64 px pictures, a coarse look at 32 px and a glance at 18 px, both by the half."""
    guard = bright_guard(0.1, glance_from=0.5)
    twin = type(guard)(guard.parts.auditor, guard.parts.repairer, config=guard.config,
                       decoders={"sd": small.tiny_decoder(4)}).attach(sd_pipe)  # fmt: skip
    report = call(twin, steps=8).safety[0]
    made = report.effective_settings["views"]["made_by"]
    assert [w.split(" ")[0] for w in made] == ["exit", "tiny"] and made[0].startswith("exit 1/2 ")
    assert report.steps[0].audits[0].decoder == "exit 1/2" and report.effective_settings["view_decoder"] == "tiny"
    jsonschema.validate(report.to_dict(), report_schema())


@pytest.mark.parametrize("value", [-0.1, 1.1, True])
def test_a_bad_start_is_refused(value):
    with pytest.raises(BadConfig, match="glance_from"):
        GuardConfig(glance_from=value)
