"""Finished pipelines that teach a flow model what they say under classifier-free guidance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.draft import flux
from guardpaint.draft.conditioning import guided
from guardpaint.train.latents import tokenise
from paperdolls.models.recipe import Batch

Text = tuple[Float[Tensor, "b tokens width"], Float[Tensor, "b pooled"]]
"""Prompt states and pooled text."""


def sd3_texts(encoders: tuple[Any, Any, Any], ids: Int[Tensor, "b l"], other_ids: Int[Tensor, "b m"]) -> Text:
    """CLIP states side by side, then T5's; pooled CLIP texts."""
    first, second = (e(ids, output_hidden_states=True) for e in encoders[:2])
    states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    states = torch.cat([states, encoders[2](other_ids)[0]], 1)
    return states, torch.cat([first.text_embeds, second.text_embeds], -1)


def sd3_velocity(
    net: Any, z: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], text: Text
) -> Float[Tensor, "b c h w"]:
    return net(z, encoder_hidden_states=text[0], pooled_projections=text[1], timestep=sigma * 1000).sample


def flux_velocity(
    net: Any,
    z: Float[Tensor, "b c h w"],
    sigma: Float[Tensor, " b"],
    text: Text,
    guidance: Float[Tensor, " b"],
) -> Float[Tensor, "b c h w"]:
    """On unpacked latents."""
    from diffusers import FluxPipeline

    family = flux.Flux()
    b, _, h, w = z.shape
    out = net(
        hidden_states=family.pack(z),
        timestep=sigma,
        guidance=guidance,
        pooled_projections=text[1],
        encoder_hidden_states=text[0],
        txt_ids=torch.zeros(text[0].shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, z.device, z.dtype),
    ).sample
    return family.unpack(out, (h, w))


@runtime_checkable
class Teacher(Protocol):
    """Guided velocities for noisy latents of a batch."""

    def velocity(
        self, batch: Batch, noisy: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], guidance: Float[Tensor, " b"]
    ) -> Float[Tensor, "b c h w"]: ...


def frozen(*parts: Any) -> None:
    for part in parts:
        part.requires_grad_(False).eval()


class FlowTeacher(ABC):
    """A pipeline in the student's latent space that predicts velocities from two texts."""

    empty: Int[Tensor, "1 l"]
    other_empty: Int[Tensor, "1 m"]

    @abstractmethod
    def said(
        self,
        z: Float[Tensor, "b c h w"],
        sigma: Float[Tensor, " b"],
        ids: Int[Tensor, "b l"],
        other_ids: Int[Tensor, "b m"],
    ) -> Float[Tensor, "b c h w"]:
        """Velocities as it predicts them, without guidance."""

    @torch.no_grad()
    def velocity(
        self, batch: Batch, noisy: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], guidance: Float[Tensor, " b"]
    ) -> Float[Tensor, "b c h w"]:
        assert batch.other_ids is not None
        ids, other = beside_empty(self.empty, batch.ids), beside_empty(self.other_empty, batch.other_ids)
        both = self.said(noisy.repeat(2, 1, 1, 1), sigma.repeat(2), ids, other)
        return guided(both, guidance, both.dim())


def beside_empty(empty: Int[Tensor, "1 l"], ids: Int[Tensor, "b l"]) -> Int[Tensor, "b2 l"]:
    """The empty prompt as often as there are prompts, then the prompts: the halves that `guided` takes."""
    return torch.cat([empty.expand(len(ids), -1), ids])


class Sd3Teacher(FlowTeacher):
    """A StableDiffusion3Pipeline."""

    def __init__(self, pipe: Any) -> None:
        self.net, self.encoders = pipe.transformer, (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
        frozen(self.net, *self.encoders)
        self.empty, self.other_empty = tokenise(pipe.tokenizer, [""]), tokenise(pipe.tokenizer_3, [""])

    def said(
        self,
        z: Float[Tensor, "b c h w"],
        sigma: Float[Tensor, " b"],
        ids: Int[Tensor, "b l"],
        other_ids: Int[Tensor, "b m"],
    ) -> Float[Tensor, "b c h w"]:
        return sd3_velocity(self.net, z, sigma, sd3_texts(self.encoders, ids, other_ids))


class FluxTeacher(FlowTeacher):
    """A FluxPipeline trained on scenes, asked at guidance 1."""

    def __init__(self, pipe: Any) -> None:
        self.net, self.text, self.text2 = pipe.transformer, pipe.text_encoder, pipe.text_encoder_2
        frozen(self.net, self.text, self.text2)
        self.empty, self.other_empty = tokenise(pipe.tokenizer, [""]), tokenise(pipe.tokenizer_2, [""])

    def said(
        self,
        z: Float[Tensor, "b c h w"],
        sigma: Float[Tensor, " b"],
        ids: Int[Tensor, "b l"],
        other_ids: Int[Tensor, "b m"],
    ) -> Float[Tensor, "b c h w"]:
        text = (self.text2(other_ids)[0], self.text(ids).pooler_output)
        return flux_velocity(self.net, z, sigma, text, torch.ones(len(z)))


class SdTeacher:
    """A StableDiffusionPipeline (ε, diffusion) in the student's latent space.

    A latent (1 − σ)·x + σ·ε of the student's straight line is, up to a factor, one of the teacher's
    √ᾱ·x + √(1 − ᾱ)·ε with the same ratio of noise to signal; above its largest ratio, at its last timestep.
    """

    def __init__(self, pipe: Any) -> None:
        self.net, self.text = pipe.unet, pipe.text_encoder
        frozen(self.net, self.text)
        self.empty = tokenise(pipe.tokenizer, [""])
        alphas = pipe.scheduler.alphas_cumprod.float()
        self.ratios = ((1 - alphas) / alphas).sqrt()

    def levels(self, sigma: Float[Tensor, " b"]) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Timestep (between whole ones) and ᾱ for each σ."""
        ratio = (sigma / (1 - sigma).clamp_min(1e-6)).clamp(max=float(self.ratios[-1]))
        above = torch.searchsorted(self.ratios, ratio.contiguous()).clamp(1, len(self.ratios) - 1)
        low, high = self.ratios[above - 1].log(), self.ratios[above].log()
        part = ((ratio.log() - low) / (high - low)).clamp(0, 1)
        return above - 1 + part, 1 / (1 + ratio**2)

    @torch.no_grad()
    def velocity(
        self, batch: Batch, noisy: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], guidance: Float[Tensor, " b"]
    ) -> Float[Tensor, "b c h w"]:
        t, alpha = self.levels(sigma)
        wide, wide_sigma = alpha.view(-1, 1, 1, 1), sigma.view(-1, 1, 1, 1)
        z = noisy * (1 - wide).sqrt() / wide_sigma
        states = self.text(beside_empty(self.empty, batch.ids))[0]
        both = self.net(torch.cat([z, z]), t.repeat(2), encoder_hidden_states=states).sample
        clean = (z - (1 - wide).sqrt() * guided(both, guidance, both.dim())) / wide.sqrt()
        return (noisy - clean) / wide_sigma
