"""Levels and clean estimates against the schedulers' own arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from hypothesis import given
from hypothesis import strategies as st

from guardpaint.draft.schedule import Levels, join, level_at, parametrisation, prediction_type, split
from guardpaint.errors import UnsupportedScheduler
from guardpaint.types import Level

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
DETERMINISTIC = {
    "ddim": lambda **k: DDIMScheduler(**SD, clip_sample=False, set_alpha_to_one=False, steps_offset=1, **k),
    "euler": lambda **k: EulerDiscreteScheduler(**SD, **k),
    "dpm1": lambda **k: DPMSolverMultistepScheduler(**SD, solver_order=1, **k),
    "flow": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("steps", [4, 10])
def test_a_perfect_model_walks_along_the_levels(name, steps):
    """With the true (x0, ε) predicted at every step, z_i = signal·x0 + sigma·ε at each of our levels."""
    scheduler = DETERMINISTIC[name]()
    scheduler.set_timesteps(steps)
    levels = Levels(scheduler, steps)
    g = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(1, 4, 8, 8, generator=g), torch.randn(1, 4, 8, 8, generator=g)
    levels.locate(scheduler.timesteps[0])
    start = levels.at(0)
    z = start.signal * x0 + start.sigma * eps
    for i, t in enumerate(scheduler.timesteps):
        output = join(x0, z, levels.at(i), levels.prediction)
        z = scheduler.step(output, t, z, return_dict=False)[0]
        after = levels.at(i + 1)
        torch.testing.assert_close(z, after.signal * x0 + after.sigma * eps, atol=2e-4, rtol=2e-4)
    assert levels.at(steps).noise == pytest.approx(0.0)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", ["ddim", "euler"])
def test_clean_estimate_matches_the_scheduler(name, prediction):
    """split() agrees with pred_original_sample of diffusers for ε and v predictions."""
    scheduler = DETERMINISTIC[name](prediction_type=prediction)
    scheduler.set_timesteps(5)
    levels = Levels(scheduler, 5)
    g = torch.Generator().manual_seed(1)
    z, output = torch.randn(1, 4, 8, 8, generator=g) * 3, torch.randn(1, 4, 8, 8, generator=g)
    t = scheduler.timesteps[0]
    levels.locate(t)
    x0, _ = split(output, z, levels.at(0), levels.prediction)
    theirs = scheduler.step(output, t, z).pred_original_sample
    torch.testing.assert_close(x0, theirs, atol=1e-3, rtol=1e-3)


@given(
    noise=st.floats(0.05, 0.95),
    kind=st.sampled_from(["epsilon", "v_prediction", "sample", "flow", "ve"]),
    seed=st.integers(0, 1000),
)
def test_join_inverts_split(noise, kind, seed):
    angle = noise * math.pi / 2
    level = Level(math.cos(angle), math.sin(angle), noise)
    if kind == "flow":
        level = Level(1 - noise, noise, noise)
    if kind == "ve":
        level, kind = Level(1.0, 14 * noise, noise), "v_prediction"
    g = torch.Generator().manual_seed(seed)
    z, output = torch.randn(2, 3, generator=g), torch.randn(2, 3, generator=g)
    x0, eps = split(output, z, level, kind)
    torch.testing.assert_close(level.signal * x0 + level.sigma * eps, z, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(join(x0, z, level, kind), output, atol=1e-3, rtol=1e-3)


def test_flow_noise_is_not_the_velocity():
    """z = (1−σ)x0 + σε, v = ε − x0: at σ = 0.25, x0 = 2, ε = 6 → z = 3, v = 4; ε̂ = z + 0.75·4 = 6."""
    z, v = torch.tensor([3.0]), torch.tensor([4.0])
    x0, eps = split(v, z, Level(0.75, 0.25, 0.25), "flow")
    assert x0.item() == pytest.approx(2.0) and eps.item() == pytest.approx(6.0)


def test_pndm_levels_follow_its_repeated_timestep():
    scheduler = PNDMScheduler(**SD, skip_prk_steps=True, steps_offset=1)
    scheduler.set_timesteps(5)
    times = scheduler.timesteps.tolist()
    assert len(times) == 6 and times[1] == times[2]
    levels = Levels(scheduler, 6)
    levels.locate(scheduler.timesteps[0])
    assert [levels.at(i).noise for i in range(6)] == [t / 1000 for t in times]
    assert levels.at(6).noise == 0.0


def test_levels_of_a_truncated_run_start_where_it_starts():
    """img2img executes the tail of the schedule."""
    scheduler = DETERMINISTIC["ddim"]()
    scheduler.set_timesteps(10)
    levels = Levels(scheduler, 4)
    levels.locate(scheduler.timesteps[6])
    assert levels.at(0).noise == pytest.approx(float(scheduler.timesteps[6]) / 1000)


def test_levels_of_a_prefix_end_noisy():
    """SDXL's denoising_end stops early: the latent after the last executed step is not clean."""
    scheduler = DETERMINISTIC["ddim"]()
    scheduler.set_timesteps(10)
    levels = Levels(scheduler, 4)
    levels.locate(scheduler.timesteps[0])
    assert levels.at(4).noise == pytest.approx(float(scheduler.timesteps[4]) / 1000)


@pytest.mark.parametrize("cls", [HeunDiscreteScheduler, UniPCMultistepScheduler])
def test_unknown_schedulers_are_refused_by_name(cls):
    with pytest.raises(UnsupportedScheduler, match=rf"{cls.__name__}.*DDIMScheduler"):
        parametrisation(cls())


def test_prediction_types():
    assert prediction_type(FlowMatchEulerDiscreteScheduler()) == "flow"
    assert prediction_type(DDPMScheduler(prediction_type="v_prediction")) == "v_prediction"


def test_level_at_is_the_training_schedule():
    scheduler = DETERMINISTIC["ddim"]()
    level = level_at(scheduler, 0.5)
    assert level.signal**2 + level.sigma**2 == pytest.approx(1.0)
    assert level.signal**2 == pytest.approx(float(scheduler.alphas_cumprod[500]))
    assert level_at(scheduler, 0.0) == Level(1.0, 0.0, 0.0)
    assert level_at(DETERMINISTIC["flow"](), 0.3) == Level(0.7, 0.3, 0.3)
