"""The Denoiser against the pipelines' own arithmetic, on every family and every supported scheduler."""

from __future__ import annotations

import copy
from dataclasses import replace

import diffusers
import pytest
import torch

from guardpaint.draft import schedule
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.families import family_of
from guardpaint.draft.tap import Listener, tapped
from guardpaint.errors import BadInput
from guardpaint.testing import small
from guardpaint.types import Level

PROMPTS = ["a red coat", "a blue hat"]
CALL = {"num_inference_steps": 4, "guidance_scale": 4.0, "height": 64, "width": 64, "output_type": "latent"}
GRID = (16, 16)
DIFFUSION = (
    "DDIMScheduler",
    "DDPMScheduler",
    "PNDMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
)
CASES = [(family, name) for family in ("sd", "sdxl") for name in DIFFUSION]
CASES += [(family, "FlowMatchEulerDiscreteScheduler") for family in ("sd3", "flux")]


def a_pipe(family: str, scheduler: str = "", **config):
    pipe = small.pipeline(family)
    if scheduler:
        if scheduler == "PNDMScheduler":
            config["skip_prk_steps"] = True
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config, **config)
    return pipe


def own_estimate(scheduler, output, timestep, sample):
    """x̂0 as diffusers itself computes it in this step, on a copy of the scheduler."""
    scheduler = copy.deepcopy(scheduler)
    vars(scheduler).pop("step", None)
    name = type(scheduler).__name__
    if name == "PNDMScheduler":  # has no name for it: from ε and ᾱ
        alpha = scheduler.alphas_cumprod[int(timestep)]
        return (sample - (1 - alpha).sqrt() * output) / alpha.sqrt()
    if name.startswith(("DPMSolver", "FlowMatch")) and scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    if name == "DPMSolverMultistepScheduler":
        return scheduler.convert_model_output(output, sample=sample)
    if name == "FlowMatchEulerDiscreteScheduler":
        return sample - scheduler.sigmas[scheduler.step_index] * output
    return scheduler.step(output, timestep, sample).pred_original_sample


class Steps(Listener):
    """Keeps what each step of a pipeline was: the spatial latents, their level, and the pipeline's own x̂0."""

    def __init__(self, pipe) -> None:
        self.pipe, self.family, self.kept = pipe, family_of(pipe), []
        self.levels = None

    def before_step(self, output, timestep, sample):
        if self.levels is None:
            self.levels = schedule.Levels(self.pipe.scheduler, self.pipe.num_timesteps)
        self.levels.locate(timestep)
        x0 = own_estimate(self.pipe.scheduler, output, timestep, sample)
        z, x0 = (self.family.unpack(t.clone(), GRID) for t in (sample, x0))
        self.kept.append((z, self.levels.at(len(self.kept)), x0))
        return output


def walked(pipe, prompts, call, seed=1):
    """(latents, level, the pipeline's own x̂0) of every step of a real run."""
    steps = Steps(pipe)
    with tapped(pipe, steps.family, steps):
        pipe(prompts, generator=torch.Generator().manual_seed(seed), **call)
    return steps.kept


def near(mine, theirs):
    """Estimates grow with 1/signal; what is compared is their distance relative to their size."""
    scale = theirs.abs().max().clamp_min(1.0)
    torch.testing.assert_close(mine / scale, theirs / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("guidance", [4.0, 1.0])
@pytest.mark.parametrize(("family", "scheduler"), CASES)
@torch.no_grad()
def test_an_estimate_is_what_the_pipeline_computes_in_that_step(family, scheduler, guidance):
    pipe, call = a_pipe(family, scheduler), {**CALL, "guidance_scale": guidance}
    kept = walked(pipe, PROMPTS, call)
    base = Denoiser.from_prompts(pipe, PROMPTS, call)
    assert base.has_cfg == (guidance > 1 and family != "flux")
    assert len(kept) == len(base.levels) - 1 and [level for _, level, _ in kept] == list(base.levels[:-1])
    for z, level, x0 in kept:
        mine, noise = base.estimate(z, level)
        near(mine, x0)
        near(level.signal * mine + level.sigma * noise, z)


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "DPMSolverMultistepScheduler", "EulerDiscreteScheduler"])
@torch.no_grad()
def test_velocity_predictions_too(scheduler):
    pipe = a_pipe("sd", scheduler, prediction_type="v_prediction")
    kept = walked(pipe, PROMPTS, CALL)
    base = Denoiser.from_prompts(pipe, PROMPTS, CALL)
    for z, level, x0 in kept:
        near(base.estimate(z, level)[0], x0)


@torch.no_grad()
def test_a_flux_under_true_guidance_has_both_branches():
    """Two network calls per step, the positive one first; without a negative prompt diffusers makes one."""
    pipe, call = a_pipe("flux"), {**CALL, "true_cfg_scale": 3.0, "negative_prompt": ["a hat", "a coat"]}
    kept = walked(pipe, PROMPTS, call)
    base = Denoiser.from_prompts(pipe, PROMPTS, call)
    assert len(base.calls) == 2
    for z, level, x0 in kept:
        near(base.estimate(z, level)[0], x0)
    z, level, x0 = kept[0]
    assert not torch.allclose(replace(base, true_cfg=1.0).estimate(z, level)[0], x0, atol=1e-3)
    assert len(Denoiser.from_prompts(pipe, PROMPTS, {**CALL, "true_cfg_scale": 3.0}).calls) == 1


@pytest.mark.parametrize(("family", "scheduler"), CASES)
@torch.no_grad()
def test_rows_at_their_own_levels_are_single_rows(family, scheduler):
    """Two latents at two levels under two guidances: each is what it is alone, with its own prompt."""
    pipe = a_pipe(family, scheduler)
    base = Denoiser.from_prompts(pipe, PROMPTS, CALL)
    levels = [base.levels[0], base.levels[2]]
    z = torch.randn(2, small.LATENT_CHANNELS[family], *GRID, generator=torch.Generator().manual_seed(2))
    guidance = torch.tensor([2.0, 5.0])
    together = base.estimate(z, levels, guidance)
    for i, prompt in enumerate(PROMPTS):
        alone = Denoiser.from_prompts(pipe, [prompt], CALL).estimate(z[i : i + 1], levels[i], float(guidance[i]))
        live = replace(base, image=i).estimate(z[i : i + 1], levels[i], guidance[i : i + 1])
        for mine, one, other in zip(together, alone, live, strict=True):
            near(mine[i : i + 1], one)
            near(other, one)
    with pytest.raises(BadInput, match="3 latents for 2 prompts"):
        base.estimate(z[[0, 1, 1]], levels[0])


@pytest.mark.parametrize("family", small.BASES)
@torch.no_grad()
def test_other_words_are_what_the_pipeline_would_have_been_told(family):
    """`with_prompt` on a running call gives the estimates of a call with that prompt and negative prompt."""
    pipe = a_pipe(family)
    call = {**CALL, "negative_prompt": ["a blue hat"]}
    if family == "flux":  # distilled guidance: there is no negative branch
        call = {**CALL, "max_sequence_length": 512}
    reworded = replace(Denoiser.from_prompts(pipe, PROMPTS, CALL), image=1).with_prompt("a red coat", "a blue hat")
    other = Denoiser.from_prompts(pipe, ["a red coat"], call)
    z = torch.randn(3, small.LATENT_CHANNELS[family], *GRID, generator=torch.Generator().manual_seed(2))
    for mine, want in zip(reworded.estimate(z, other.levels[1]), other.estimate(z, other.levels[1]), strict=True):
        near(mine, want)


@torch.no_grad()
def test_a_flux_without_distilled_guidance_is_guided_by_its_branches():
    """Under other words: output = negative + g · (positive − negative), g for each row."""
    pipe = a_pipe("flux")
    with small.seeded(0):
        pipe.transformer = type(pipe.transformer).from_config({**pipe.transformer.config, "guidance_embeds": False})
    base = Denoiser.from_prompts(pipe, PROMPTS[:1], CALL)
    assert base.calls[0].kwargs["guidance"] is None
    reworded = base.with_prompt("a red coat", "a blue hat")
    positive, negative = (base.with_prompt(p, p) for p in ("a red coat", "a blue hat"))
    z = torch.randn(2, 16, *GRID, generator=torch.Generator().manual_seed(2))
    level = base.levels[1]
    one, other = positive.output(z, level, 1.0), negative.output(z, level, 1.0)
    g = torch.tensor([2.0, 5.0])
    near(reworded.output(z, level, g), other + g.view(-1, 1, 1, 1) * (one - other))
    assert len(reworded.calls) == 2 and not torch.allclose(one, other)


def test_a_null_embedding_gets_gradients_and_takes_the_negative_rows():
    pipe = a_pipe("sd")
    base = replace(Denoiser.from_prompts(pipe, PROMPTS, CALL), image=1)
    z, level = torch.randn(1, 4, *GRID, generator=torch.Generator().manual_seed(2)), base.levels[2]
    embedding = base.null_states.clone().requires_grad_(True)
    same = base.with_null_embedding(embedding).estimate(z, level)[0]
    torch.testing.assert_close(same, base.estimate(z, level)[0])
    (gradient,) = torch.autograd.grad(same.square().sum(), embedding)
    assert gradient.abs().max() > 0 and gradient.isfinite().all()
    prompt = base.rows(base.calls[0], 1, (0, 1)).kwargs["encoder_hidden_states"][1:]
    without = base.with_null_embedding(prompt).estimate(z, level)[0]
    near(without.detach(), base.estimate(z, level, 1.0)[0].detach())


@torch.no_grad()
def test_an_inpainting_pipeline_keeps_its_mask_and_picture():
    """Nine channels: the recorded call's mask and masked latents, or those that are given.

    The pipeline draws the masked latents with its generator, so both runs have the same seed.
    """
    pipe = small.inpainter().pipe
    pipe.set_progress_bar_config(disable=True)
    g = torch.Generator().manual_seed(4)
    picture, noise = torch.rand(2, 3, 64, 64, generator=g), torch.rand(2, 1, 64, 64, generator=g)
    call = {**CALL, "image": picture, "mask_image": (noise > 0.5).float()}
    kept = walked(pipe, PROMPTS, call, seed=0)
    base = Denoiser.from_prompts(pipe, PROMPTS, call)
    for z, level, x0 in kept:
        near(base.estimate(z, level)[0], x0)
    z, level, x0 = kept[1]
    near(replace(base, image=1).estimate(z[1:], level)[0], x0[1:])
    extra = base.calls[0].sample[:2, 4:]
    near(base.estimate(z, level, extra=extra)[0], x0)
    assert not torch.allclose(base.estimate(z, level, extra=1 - extra)[0], x0, atol=1e-3)


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3"])
@torch.no_grad()
def test_from_encoded_text_is_from_prompts(family):
    pipe = a_pipe(family)
    base = Denoiser.from_prompts(pipe, PROMPTS, CALL)
    again = Denoiser.from_states(pipe, base.calls[0].conditioning(), batch=2, guidance=4.0)
    z = torch.randn(2, small.LATENT_CHANNELS[family], *GRID, generator=torch.Generator().manual_seed(2))
    assert torch.equal(base.estimate(z, base.levels[1])[0], again.estimate(z, base.levels[1])[0])
    with pytest.raises(BadInput, match="4 rows of text for 3 prompts"):
        Denoiser.from_states(pipe, base.calls[0].conditioning(), batch=3)


@torch.no_grad()
def test_a_flux_from_encoded_text_finds_its_positions():
    """Two branches by hand: negative + 3 · (positive − negative), the distilled input at the base's own guidance."""
    pipe = a_pipe("flux")
    base = Denoiser.from_prompts(pipe, PROMPTS, CALL)
    text = {k: v for k, v in base.calls[0].conditioning().items() if k not in ("img_ids", "txt_ids")}
    z = torch.randn(1, 16, *GRID, generator=torch.Generator().manual_seed(2))
    level = base.levels[1]
    negative, positive = (replace(base, image=i).output(z, level) for i in (0, 1))
    both = Denoiser.from_states(pipe, text, batch=1, guidance=4.0, true_cfg=3.0)
    near(both.output(z, level), negative + 3 * (positive - negative))


def test_building_a_denoiser_leaves_the_pipeline_as_it_was(pipe):
    before = {k: id(v) for k, v in vars(pipe).items() if k in ("unet", "transformer", "vae", "scheduler")}
    base = Denoiser.from_prompts(pipe, PROMPTS, CALL)
    assert {k: id(v) for k, v in vars(pipe).items() if k in before} == before
    assert "step" not in vars(pipe.scheduler)
    assert isinstance(base.level(0.5), Level) and base.levels[0].noise > base.levels[-1].noise


class Times(Listener):
    """Keeps the time that each denoiser call was given, and how noisy the step was."""

    def __init__(self, pipe) -> None:
        self.pipe, self.given, self.levels = pipe, [], None

    def before_call(self, call):
        self.given.append(call.args[1] if len(call.args) > 1 else call.kwargs["timestep"])
        return call

    def before_step(self, output, timestep, sample):
        if self.levels is None:
            self.levels = schedule.Levels(self.pipe.scheduler, self.pipe.num_timesteps)
        self.levels.locate(timestep)
        return output


def heard(module):
    """A list of the times that a module is called with."""
    times = []
    name = "timestep"
    module.register_forward_pre_hook(lambda m, args, kwargs: times.append(kwargs[name]), with_kwargs=True)
    return times


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["sd3", "flux"])
@torch.no_grad()
def test_a_replay_is_given_the_time_that_the_pipeline_gives(family, dtype):
    """SD 3 takes t in fp32; FLUX's pipeline rounds t to the latents' precision before it divides by 1000."""
    pipe = a_pipe(family).to(dtype)
    listener = Times(pipe)
    with tapped(pipe, family_of(pipe), listener):
        pipe(PROMPTS[:1], generator=torch.Generator().manual_seed(1), **{**CALL, "num_inference_steps": 7})
    base = Denoiser.from_prompts(pipe, PROMPTS[:1], {**CALL, "num_inference_steps": 7})
    times = heard(pipe.transformer)
    z = torch.zeros(1, small.LATENT_CHANNELS[family], *GRID)
    for i, theirs in enumerate(listener.given):
        base.output(z, listener.levels.at(i))
        assert times[-1].dtype == theirs.dtype and torch.equal(times[-1][:1], theirs[:1]), (times[-1], theirs)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
@torch.no_grad()
def test_a_replay_rescales_guidance_as_the_pipeline_does(family):
    pipe, call = a_pipe(family, "EulerDiscreteScheduler"), {**CALL, "guidance_rescale": 0.7}
    kept = walked(pipe, PROMPTS, call)
    base = Denoiser.from_prompts(pipe, PROMPTS, call)
    for z, level, x0 in kept:
        near(base.estimate(z, level)[0], x0)
    z, level, x0 = kept[1]
    assert not torch.allclose(replace(base, rescale=0.0).estimate(z, level)[0], x0, atol=1e-3)


class Replays(Steps):
    """Replays every step with the calls that were made in it."""

    def __init__(self, pipe) -> None:
        super().__init__(pipe)
        self.calls, self.replayed = [], []

    def before_call(self, call):
        self.calls.append(call)
        return call

    def before_step(self, output, timestep, sample):
        super().before_step(output, timestep, sample)
        z, level, _ = self.kept[-1]
        calls, self.calls = tuple(self.calls), []
        settings = self.family.guidance_of(self.pipe)
        base = Denoiser(self.pipe, self.pipe.vae, self.family, calls, batch=len(z), **settings)
        self.replayed.append((len(calls), base.estimate(z, level)[0]))
        self.calls = []
        return output


@torch.no_grad()
def test_a_replay_skips_layers_where_the_pipeline_does():
    """SD 3.5's skip-layer guidance makes a second call in the steps of its window."""
    with small.seeded(0):
        pipe = a_pipe("sd3")
        pipe.transformer = type(pipe.transformer).from_config({**pipe.transformer.config, "num_layers": 3}).eval()
    call = {**CALL, "skip_guidance_layers": [1], "skip_layer_guidance_start": 0.2, "skip_layer_guidance_stop": 0.8}
    steps = Replays(pipe)
    with tapped(pipe, steps.family, steps):
        pipe(PROMPTS, generator=torch.Generator().manual_seed(1), **call)
    assert [n for n, _ in steps.replayed] == [1, 2, 2, 2]
    for (_, mine), (_, _, x0) in zip(steps.replayed, steps.kept, strict=True):
        near(mine, x0)
