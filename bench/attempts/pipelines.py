"""Pipelines made of a guarded twin by diffusers' own means: guarded, or refused with the way out."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attempts import Outcome


def twin() -> Any:
    """A small pipeline under a guard that flags everything and blocks."""
    from guardpaint.guard import GuardPaint
    from guardpaint.policy import Policy
    from guardpaint.testing import small
    from guardpaint.testing.doubles import AlwaysUnsafe, PaintsFlat

    policy = replace(Policy.default(), last_resort=("block",))
    return GuardPaint(AlwaysUnsafe(), PaintsFlat(), policy=policy).attach(small.pipeline("sd"))


def stays_guarded(make: Callable[[Any], Any], **call: Any) -> Outcome:
    """Make a pipeline of the twin and draw with it: an error that names `attach`, or a blocked picture."""
    import torch

    generator = torch.Generator().manual_seed(1)
    more = {"num_inference_steps": 4, "generator": generator, "output_type": "pt", **call}
    try:
        out = make(twin())("a person", **more)
    except Exception as error:
        named = "attach" in str(error)
        return Outcome(
            "an error that names attach, or a blocked picture", f"{type(error).__name__}: {error}"[:160], named
        )
    blocked = getattr(out, "safety", None) and out.safety[0].status == "blocked"
    got = "blocked" if blocked else "an unguarded picture"
    return Outcome("an error that names attach, or a blocked picture", got, bool(blocked))


def picture() -> Any:
    import torch

    return torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def the_twin_itself() -> Outcome:
    return stays_guarded(lambda t: t, height=64, width=64)


def from_pipe_of_a_class() -> Outcome:
    from diffusers import StableDiffusionImg2ImgPipeline

    return stays_guarded(lambda t: StableDiffusionImg2ImgPipeline.from_pipe(t), image=picture())


def from_pipe_of_its_own_class() -> Outcome:
    from diffusers import StableDiffusionPipeline

    return stays_guarded(lambda t: StableDiffusionPipeline.from_pipe(t), height=64, width=64)


def auto_pipeline_for_text() -> Outcome:
    from diffusers import AutoPipelineForText2Image

    return stays_guarded(lambda t: AutoPipelineForText2Image.from_pipe(t), height=64, width=64)


def auto_pipeline_for_images() -> Outcome:
    from diffusers import AutoPipelineForImage2Image

    return stays_guarded(lambda t: AutoPipelineForImage2Image.from_pipe(t), image=picture())


def a_class_with_the_twins_components() -> Outcome:
    from diffusers import StableDiffusionPipeline

    parts = {"requires_safety_checker": False}
    return stays_guarded(lambda t: StableDiffusionPipeline(**t.components, **parts), height=64, width=64)


def components_with_another_scheduler() -> Outcome:
    """The twin's scheduler refuses to step; an attacker brings his own."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    def make(t: Any) -> Any:
        parts = {**t.components, "scheduler": DDIMScheduler.from_config(t.scheduler.config)}
        return StableDiffusionPipeline(**parts, requires_safety_checker=False)

    return stays_guarded(make, height=64, width=64)


def the_scheduler_is_replaced() -> Outcome:
    from diffusers import DDIMScheduler

    def make(t: Any) -> Any:
        t.scheduler = DDIMScheduler.from_config(t.scheduler.config)
        return t

    return stays_guarded(make, height=64, width=64)


def a_copy() -> Outcome:
    return stays_guarded(copy.copy, height=64, width=64)


def a_saved_twin_is_the_plain_pipeline() -> Outcome:
    """What a twin saves is the pipeline it was made of, and it draws."""
    from diffusers import StableDiffusionPipeline

    with tempfile.TemporaryDirectory() as folder:
        twin().save_pretrained(folder)
        pipe = StableDiffusionPipeline.from_pretrained(
            folder, safety_checker=None, use_safetensors=True, local_files_only=True
        )
        pipe.set_progress_bar_config(disable=True)
        shape = pipe("a person", num_inference_steps=2, height=64, width=64, output_type="pt").images.shape
    return Outcome("a saved twin loads as the plain pipeline", f"a picture of {tuple(shape)}", shape[-1] == 64)


ATTEMPTS = (
    the_twin_itself,
    from_pipe_of_a_class,
    from_pipe_of_its_own_class,
    auto_pipeline_for_text,
    auto_pipeline_for_images,
    a_class_with_the_twins_components,
    components_with_another_scheduler,
    the_scheduler_is_replaced,
    a_copy,
    a_saved_twin_is_the_plain_pipeline,
)
