"""An fp16 VAE that overflows is cast to fp32 in place; calls that share it must not cast it under each other's decode."""

from __future__ import annotations

import threading

import pytest
import torch

from guardpaint.draft.codec import vae_decode
from guardpaint.draft.families import family_of
from guardpaint.draft.tap import Listener, tapped
from guardpaint.testing import small


class Hears(Listener):
    """Changes nothing."""


def half_pipe():
    """SDXL whose VAE asks for fp32: the denoiser and the text encoders in fp32, because fp16 is slow on a CPU."""
    pipe = small.pipeline("sdxl")
    pipe.vae.register_to_config(force_upcast=True)
    pipe.vae.to(torch.float16)
    return pipe


def run(pipe, seed=1):
    """The pipeline's own decode under the tap, as far as the cast goes; returns the picture."""
    with tapped(pipe, family_of(pipe), Hears()):
        return pipe(
            "a hat", num_inference_steps=1, height=64, width=64, output_type="pt",
            generator=torch.Generator().manual_seed(seed),
        ).images  # fmt: skip


class Meets:
    """Holds a decode open until a second one has begun, and the second one until the first has ended, if it can."""

    def __init__(self, vae):
        self.inside, self.met, self.ended = threading.Event(), threading.Event(), threading.Event()
        vae.decoder.register_forward_pre_hook(self)
        self.decodes = 0

    def __call__(self, module, args):
        self.decodes += 1
        if self.decodes == 1:
            self.inside.set()
            self.met.wait(1.5)
        else:
            self.met.set()
            self.ended.wait(1.5)


@pytest.mark.parametrize("first", ["pipeline", "guard"])
@torch.no_grad()
def test_the_pipelines_decode_and_a_view_of_the_same_vae_wait_for_each_other(first):
    pipe, other = half_pipe(), half_pipe()
    latent = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2))
    own, view = run(other), vae_decode(other.vae, latent, torch.device("cpu"))
    vae = pipe.vae
    meets, found, failed = Meets(vae), {}, []

    def work(name, function):
        try:
            with torch.no_grad():
                found[name] = function()
        except Exception as error:
            failed.append(error)
        meets.ended.set()

    jobs = {
        "pipeline": lambda: run(pipe),
        "guard": lambda: vae_decode(vae, latent, torch.device("cpu")),
    }
    second = next(n for n in jobs if n != first)
    threads = [threading.Thread(target=work, args=(n, jobs[n])) for n in (first, second)]
    threads[0].start()
    assert meets.inside.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    assert torch.equal(found["pipeline"], own) and torch.equal(found["guard"], view)
    assert pipe.vae.dtype == torch.float16


def test_a_call_that_fails_while_it_holds_the_vae_lets_go_of_it():
    pipe = half_pipe()
    pipe.vae.decoder.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(pipe)
    assert pipe.vae.dtype == torch.float16
    free = []
    thread = threading.Thread(target=lambda: free.append(vae_encode_shape(pipe.vae)))
    thread.start()
    thread.join(20)
    assert free, "the lock is still held"


def vae_encode_shape(vae):
    from guardpaint.draft.codec import vae_encode

    with torch.no_grad():
        return vae_encode(vae, torch.zeros(1, 3, 64, 64), torch.device("cpu")).shape


@torch.no_grad()
def test_pictures_are_those_of_the_pipeline_alone():
    pipe, bare = half_pipe(), half_pipe()
    call = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "pt"}
    assert torch.equal(run(pipe), bare("a hat", generator=torch.Generator().manual_seed(1), **call).images)
