"""Ways around a guarded twin that diffusers offers: each is refused, or stays guarded."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoPipelineForImage2Image, DDIMScheduler, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from helpers import call, gen

from guardpaint.doors.attach import Reserved
from guardpaint.errors import BadInput
from guardpaint.guard import GuardPaint
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, PaintsFlat

MAKERS = {
    "from_pipe": lambda twin: StableDiffusionImg2ImgPipeline.from_pipe(twin),
    "AutoPipeline": lambda twin: AutoPipelineForImage2Image.from_pipe(twin),
    "components": lambda twin: StableDiffusionImg2ImgPipeline(**twin.components, requires_safety_checker=False),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_pipeline_made_of_a_twins_parts_does_not_draw_unguarded(sd_pipe, make):
    made = make(GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(sd_pipe))
    made.set_progress_bar_config(disable=True)
    with pytest.raises(BadInput, match="attach"):
        made("x", image=torch.rand(1, 3, 64, 64), num_inference_steps=4, generator=gen(), output_type="pt")


def test_the_same_from_the_original_can_be_guarded(sd_pipe):
    made = StableDiffusionImg2ImgPipeline.from_pipe(sd_pipe)
    made.set_progress_bar_config(disable=True)
    twin = GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(made)
    out = twin("x", image=torch.rand(1, 3, 64, 64), num_inference_steps=4, generator=gen(), output_type="pt")
    assert out.safety[0].status == "blocked"


def test_a_twin_takes_another_scheduler_and_stays_guarded(sd_pipe):
    own = sd_pipe.scheduler
    twin = GuardPaint(AlwaysSafe(), PaintsFlat()).attach(sd_pipe)
    twin.scheduler = DDIMScheduler.from_config(twin.scheduler.config, timestep_spacing="trailing")
    assert call(twin, steps=3).safety[0].status == "clean"
    assert sd_pipe.scheduler is own, "the original keeps its own"
    sd_pipe.scheduler = DDIMScheduler.from_config(own.config, timestep_spacing="trailing")
    assert torch.equal(call(twin, steps=3).images, call(sd_pipe, steps=3).images)
    with pytest.raises(BadInput, match="attach"):
        call(StableDiffusionPipeline(**twin.components, requires_safety_checker=False), steps=3)


def test_another_scheduler_beside_a_twins_parts_does_not_help(pipe):
    twin = GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(pipe)
    other = type(pipe.scheduler).from_config(pipe.scheduler.config)
    assert not isinstance(other, Reserved)
    more = {"requires_safety_checker": False} if type(pipe) is StableDiffusionPipeline else {}
    made = type(pipe)(**{**twin.components, "scheduler": other}, **more)
    made.set_progress_bar_config(disable=True)
    with pytest.raises(BadInput, match="attach"):
        call(made, steps=2)
    assert call(twin, steps=2).safety[0].status == "blocked", "the twin itself still draws"
    assert call(GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(made), steps=2).safety[0].status == "blocked"
    call(pipe, steps=2)


def test_a_twins_denoiser_shares_everything_with_the_original(sd_pipe):
    """Hooks, adapters and in-place compilation that are set on one are set on the other."""
    twin = GuardPaint(AlwaysSafe(), PaintsFlat()).attach(sd_pipe)
    assert isinstance(twin.unet, type(sd_pipe.unet)) and type(twin.unet).__name__ == type(sd_pipe.unet).__name__
    assert vars(twin.unet) is vars(sd_pipe.unet)
    twin.unet.to(torch.float64)
    assert sd_pipe.unet.dtype == torch.float64
    twin.unet.to(torch.float32)
    twin.unet.compile(backend="eager")
    assert torch.equal(call(twin, steps=2).images, call(sd_pipe, steps=2).images)


def test_a_denoiser_that_is_put_into_a_twin_is_guarded_too(sd_pipe):
    twin = GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(sd_pipe)
    twin.unet = sd_pipe.unet
    other = DDIMScheduler.from_config(sd_pipe.scheduler.config)
    made = StableDiffusionPipeline(**{**twin.components, "scheduler": other}, requires_safety_checker=False)
    with pytest.raises(BadInput, match="attach"):
        call(made, steps=2)
    with pytest.raises(BadInput, match="compile"):
        twin.unet = torch.compile(twin.unet, backend="eager")
    twin.unet = torch.compile(sd_pipe.unet, backend="eager")
    assert call(twin, steps=2).safety[0].status == "blocked"


def test_a_twin_still_saves_and_names_its_scheduler(sd_pipe, tmp_path):
    twin = GuardPaint(AlwaysSafe(), PaintsFlat()).attach(sd_pipe)
    assert type(twin.scheduler).__name__ == "DDIMScheduler" and isinstance(twin.scheduler, DDIMScheduler)
    twin.save_pretrained(tmp_path)
    again = StableDiffusionPipeline.from_pretrained(tmp_path)
    assert type(again.scheduler) is DDIMScheduler
    assert call(twin, steps=2).safety[0].effective_settings["scheduler"] == "DDIMScheduler"
