"""Steps, guidance and size of a pipeline that nobody gave any: what it does by itself, read in one place."""

from __future__ import annotations

import pytest

from guardpaint.bases import Base, BaseOptions, load_base
from guardpaint.draft.call_settings import CallSettings, call_settings
from guardpaint.errors import BadConfig, BadInput
from guardpaint.serve.engine import Engine
from guardpaint.testing import small

OWN = {
    "sd": CallSettings(50, 7.5, 64, 64),
    "sdxl": CallSettings(50, 5.0, 64, 64),
    "sd3": CallSettings(28, 7.0, 64, 64),
    "flux": CallSettings(28, 3.5, 512, 512),  # 128 latents, enlarged 4-fold by the small VAE
}


@pytest.mark.parametrize("family", small.BASES)
def test_defaults_of_every_family(family):
    pipe = small.pipeline(family)
    assert call_settings(pipe) == OWN[family]
    assert Engine(pipe, {}).ask.guidance == OWN[family].guidance
    assert Engine(pipe, {}).ask.size == (OWN[family].height, OWN[family].width)
    assert Base("x", pipe, {}).guidance == OWN[family].guidance
    assert Base("x", pipe, {}).two_branches == (family != "flux")


@pytest.mark.parametrize("family", small.BASES)
def test_the_size_is_the_one_that_the_pipeline_draws(family):
    """`native` draws without a size, the other call with the size that was read."""
    pipe = small.pipeline(family)
    if family == "flux":
        pipe.default_sample_size = 16  # 512 pixels would take a while
    own = call_settings(pipe)
    native = pipe("a cup", num_inference_steps=1).images[0]
    assert native.size == (own.width, own.height)


def test_sizes_at_full_scale():
    """A VAE with three halvings: SD 1.5 at 512, FLUX and SD 3 at 1024."""
    pixels = {}
    for family, side in (("sd", 64), ("sd3", 128), ("flux", None)):
        pipe = small.pipeline(family)
        pipe.vae_scale_factor = 8
        if family == "sd":
            pipe.unet.register_to_config(sample_size=side)
        if family == "sd3":
            pipe.default_sample_size = side
        pixels[family] = call_settings(pipe).height
    assert pixels == {"sd": 512, "sd3": 1024, "flux": 1024}


def test_a_picture_need_not_be_square():
    pipe = small.pipeline("sd")
    pipe.unet.register_to_config(sample_size=[8, 16])
    assert call_settings(pipe) == CallSettings(50, 7.5, 32, 64)
    assert call_settings(pipe, {"width": 40}) == CallSettings(50, 7.5, 32, 40)
    assert call_settings(pipe, {"height": None, "guidance_scale": 0.0}) == CallSettings(50, 0.0, 32, 64)


def test_a_guarded_twin_is_called_like_its_base():
    pipe = small.pipeline("sd3")
    assert call_settings(small.guard().attach(pipe)) == call_settings(pipe)


def test_a_pipeline_without_a_size_is_an_error():
    pipe = small.pipeline("sd")
    pipe.unet.register_to_config(sample_size=None)
    with pytest.raises(BadInput, match="does not state its picture size; give it with --size"):
        call_settings(pipe)
    assert call_settings(pipe, {"height": 48, "width": 48}).height == 48


def test_options_come_before_what_a_base_was_trained_for():
    own = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 64, "width": 64, "max_sequence_length": 36}
    assert BaseOptions().over(own) == own
    chosen = BaseOptions(steps=9, guidance=0.0, size=32).over(own)
    assert chosen == {**own, "num_inference_steps": 9, "guidance_scale": 0.0, "height": 32, "width": 32}
    base = load_base("tiny-sd", BaseOptions(steps=3, size=32))
    assert base.settings == CallSettings(3, 7.5, 32, 32)
    for bad in ({"steps": 0}, {"guidance": -1.0}, {"guidance": float("nan")}, {"size": 4}):
        with pytest.raises(BadConfig, match=f"{next(iter(bad))}="):
            BaseOptions(**bad)


def test_named_bases_keep_the_call_that_they_were_trained_for():
    base = load_base("mini-sd3-turbo")
    assert base.settings.steps == base.call["num_inference_steps"] == 4
    assert base.guidance == base.call["guidance_scale"] and base.settings.height == 64
