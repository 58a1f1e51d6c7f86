"""Ways around a guarded twin that diffusers offers: each is refused, or stays guarded."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoPipelineForImage2Image, DDIMScheduler, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from helpers import call, gen

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


def test_a_twin_still_saves_and_names_its_scheduler(sd_pipe, tmp_path):
    twin = GuardPaint(AlwaysSafe(), PaintsFlat()).attach(sd_pipe)
    assert type(twin.scheduler).__name__ == "DDIMScheduler" and isinstance(twin.scheduler, DDIMScheduler)
    twin.save_pretrained(tmp_path)
    again = StableDiffusionPipeline.from_pretrained(tmp_path)
    assert type(again.scheduler) is DDIMScheduler
    assert call(twin, steps=2).safety[0].effective_settings["scheduler"] == "DDIMScheduler"
