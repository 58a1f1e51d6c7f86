"""The loop's arithmetic against a denoiser that knows the clean latent, on every sampler and family."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, PNDMScheduler

from guardpaint.draft.schedule import Levels, check
from guardpaint.errors import UnsupportedScheduler
from guardpaint.testing import perfect, small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat

CASES = [(name, family) for name, sampler in perfect.SAMPLERS.items() for family in sampler.families]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_estimates_early_stops_and_repairs_are_right_to_float_precision(name, family):
    """x̂0 of every step, the clean latent if the call stopped there, a reinsertion, and what is held to the end."""
    found = perfect.checked(name, family)
    assert set(found.errors) == {"x0", "early_stop", "reinserted", "held", "left_alone"}
    assert found.errors["x0"] <= perfect.TOLERANCE
    most = perfect.allowed(name, family)
    assert all(error <= most[what] for what, error in found.errors.items()), (found.errors, most)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_pndm_with_v_drifts_as_far_without_a_guard(family):
    """Its final latent is 0.07 off with a perfect denoiser and no tap; a call that is only looked at ends the same."""
    own = perfect.own_errors("pndm_v", family)
    assert 0.01 < own["unguarded"] < 0.1 and own["x0"] <= perfect.TOLERANCE
    assert max(own["held"], own["left_alone"]) == pytest.approx(own["unguarded"], abs=1e-6)


@pytest.mark.parametrize(("name", "family"), [c for c in CASES if perfect.SAMPLERS[c[0]].draws])
def test_a_feathered_repair_keeps_the_spread_of_the_samplers_noise(name, family):
    """Blending two independent noises half and half would leave a spread of 0.71."""
    spreads = perfect.checked(name, family).spreads
    assert all(0.95 < spreads[place] < 1.05 for place in ("outside", "feather", "inside")), spreads


@pytest.mark.parametrize("name", [n for n, s in perfect.SAMPLERS.items() if "sdxl" in s.families and s.call == {}])
def test_a_call_that_stops_early_is_judged_on_its_clean_estimate(name):
    """SDXL's denoising_end leaves a noisy latent; what is judged is the picture in it."""
    found = perfect.checked(name, "sdxl", edit_at=1, denoising_end=0.6)
    most = perfect.allowed(name, "sdxl", denoising_end=0.6)
    assert all(found.errors[what] <= most[what] for what in ("held", "left_alone")), (found.errors, most)


def test_pndm_is_audited_wherever_the_next_step_goes_on_from_the_latent():
    """Plain PNDM repeats its first step; its Runge-Kutta start makes three steps of four calls each."""
    assert perfect.checked("pndm", "sd").audited == tuple(range(1, 11))
    assert perfect.checked("pndm_prk", "sd").audited == (3, 7, *range(11, 19))


@pytest.mark.parametrize("cls", [PNDMScheduler, DPMSolverMultistepScheduler])
def test_subclasses_have_their_history_edited_like_their_parents(cls):
    def history(scheduler):
        scheduler.set_timesteps(4)
        levels = Levels(scheduler, len(scheduler.timesteps))
        z = torch.ones(1, 4, 2, 2)
        for t in scheduler.timesteps[:3]:
            levels.locate(t)
            z = scheduler.step(z * 0.5, t, z).prev_sample
        levels.edit_history(2, 0, torch.full((4, 2, 2), 7.0), torch.ones(4, 2, 2), torch.full((4, 2, 2), 9.0))
        return torch.stack(scheduler.ets if isinstance(scheduler, PNDMScheduler) else scheduler.model_outputs)

    class Mine(cls):
        pass

    settings = {"skip_prk_steps": True} if cls is PNDMScheduler else {}
    theirs = history(cls(**settings))
    assert torch.equal(history(Mine(**settings)), theirs)
    want = 9.0 if cls is PNDMScheduler else 7.0
    torch.testing.assert_close(theirs, torch.full_like(theirs, want), atol=1e-4, rtol=0)


class Clips(DDIMScheduler):
    pass


@pytest.mark.parametrize(
    ("scheduler", "setting"),
    [
        (DDIMScheduler(clip_sample=True), "clip_sample"),
        (Clips(clip_sample=True), "clip_sample"),
        (DDPMScheduler(clip_sample=False, thresholding=True), "thresholding"),
        (DPMSolverMultistepScheduler(thresholding=True), "thresholding"),
    ],
)
def test_a_scheduler_that_clips_is_refused_with_the_way_out(scheduler, setting):
    from guardpaint.guard import GuardPaint

    name = type(scheduler).__name__
    pipe = small.pipeline("sd")
    pipe.scheduler = scheduler
    with pytest.raises(UnsupportedScheduler, match=rf"{name} with {setting}=True.*{name}.from_config.*{setting}=False"):
        GuardPaint(AlwaysSafe(), PaintsFlat()).attach(pipe)
    check(type(scheduler).from_config(scheduler.config, **{setting: False}))


def test_the_measured_errors_are_metrics_with_rows(monkeypatch):
    monkeypatch.setattr(perfect, "SAMPLERS", {k: perfect.SAMPLERS[k] for k in ("ddim", "flow_euler")})
    metrics, rows = perfect.measured()
    assert set(metrics) == {"perfect_denoiser.max_error.ddim", "perfect_denoiser.max_error.flow_euler"}
    assert all(m["met"] and m["value"] > 0 for m in metrics.values())
    assert [(r["scheduler"], r["family"]) for r in rows] == [
        ("ddim", "sd"), ("ddim", "sdxl"), ("flow_euler", "sd3"), ("flow_euler", "flux"),
    ]  # fmt: skip
