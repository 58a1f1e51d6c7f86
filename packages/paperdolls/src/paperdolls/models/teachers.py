"""Finished pipelines as teachers of a flow model: their predictions under classifier-free guidance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.draft import flux, sd3
from guardpaint.draft.denoiser import Denoiser
from guardpaint.train.latents import tokenise
from guardpaint.types import Level
from paperdolls.models.recipe import Batch

Text = tuple[Float[Tensor, "b tokens width"], Float[Tensor, "b pooled"]]
"""Prompt states and pooled text."""
SD3, FLUX = sd3.SD3(), flux.Flux()


def sd3_texts(encoders: tuple[Any, Any, Any], ids: Int[Tensor, "b l"], other_ids: Int[Tensor, "b m"]) -> Text:
    """The text inputs of an SD 3 transformer: the states of both CLIPs and of T5, and the pooled CLIP texts."""
    first, second = (e(ids, output_hidden_states=True) for e in encoders[:2])
    states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    states = torch.cat([states, encoders[2](other_ids)[0]], 1)
    return states, torch.cat([first.text_embeds, second.text_embeds], -1)


def sd3_velocity(
    net: Any, z: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], text: Text
) -> Float[Tensor, "b c h w"]:
    """The velocity that an SD 3 transformer predicts without guidance."""
    return SD3.output(net, z, SD3.time(sigma), {"encoder_hidden_states": text[0], "pooled_projections": text[1]})


def flux_velocity(
    net: Any,
    z: Float[Tensor, "b c h w"],
    sigma: Float[Tensor, " b"],
    text: Text,
    guidance: Float[Tensor, " b"],
) -> Float[Tensor, "b c h w"]:
    """The velocity that a FLUX transformer predicts for unpacked latents; `guidance` is its distilled input."""
    states = {"encoder_hidden_states": text[0], "pooled_projections": text[1], "guidance": guidance}
    return FLUX.output(net, z, FLUX.time(sigma), states)


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

    pipe: Any
    empty: Int[Tensor, "1 l"]
    other_empty: Int[Tensor, "1 m"]

    @abstractmethod
    def denoiser(
        self, ids: Int[Tensor, "b2 l"], other_ids: Int[Tensor, "b2 m"], guidance: Float[Tensor, " b"]
    ) -> Denoiser:
        """The pipeline's denoiser under these texts, [empty, prompts], and classifier-free guidance for each prompt."""

    @torch.no_grad()
    def velocity(
        self, batch: Batch, noisy: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], guidance: Float[Tensor, " b"]
    ) -> Float[Tensor, "b c h w"]:
        assert batch.other_ids is not None
        ids, other = beside_empty(self.empty, batch.ids), beside_empty(self.other_empty, batch.other_ids)
        base = self.denoiser(ids, other, guidance)
        return base.output(noisy, [base.level(s) for s in sigma.tolist()])


def beside_empty(empty: Int[Tensor, "1 l"], ids: Int[Tensor, "b l"]) -> Int[Tensor, "b2 l"]:
    """The empty prompt as often as there are prompts, then the prompts: the two branches of a `Denoiser`."""
    return torch.cat([empty.expand(len(ids), -1), ids])


class Sd3Teacher(FlowTeacher):
    """A StableDiffusion3Pipeline."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.encoders = pipe, (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
        frozen(pipe.transformer, *self.encoders)
        self.empty, self.other_empty = tokenise(pipe.tokenizer, [""]), tokenise(pipe.tokenizer_3, [""])

    def denoiser(
        self, ids: Int[Tensor, "b2 l"], other_ids: Int[Tensor, "b2 m"], guidance: Float[Tensor, " b"]
    ) -> Denoiser:
        states, pooled = sd3_texts(self.encoders, ids, other_ids)
        text = {"encoder_hidden_states": states, "pooled_projections": pooled}
        return Denoiser.from_states(self.pipe, text, len(guidance), guidance)


class FluxTeacher(FlowTeacher):
    """A FluxPipeline trained on scenes. Its distilled guidance stays at 1, the only value that it was trained with."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.text, self.text2 = pipe, pipe.text_encoder, pipe.text_encoder_2
        frozen(pipe.transformer, self.text, self.text2)
        self.empty, self.other_empty = tokenise(pipe.tokenizer, [""]), tokenise(pipe.tokenizer_2, [""])

    def denoiser(
        self, ids: Int[Tensor, "b2 l"], other_ids: Int[Tensor, "b2 m"], guidance: Float[Tensor, " b"]
    ) -> Denoiser:
        states, pooled = self.text2(other_ids)[0], self.text(ids).pooler_output
        text = {"encoder_hidden_states": states, "pooled_projections": pooled, "guidance": torch.ones(len(ids))}
        return Denoiser.from_states(self.pipe, text, len(guidance), guidance=1.0, true_cfg=guidance)


class SdTeacher:
    """A StableDiffusionPipeline (ε, diffusion) in the student's latent space.

    A latent (1 − σ)·x + σ·ε of the student is, up to a factor, the teacher's latent √ᾱ·x + √(1 − ᾱ)·ε with the same
    ratio of noise to signal. Above the teacher's largest ratio its last timestep is used.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.text = pipe, pipe.text_encoder
        frozen(pipe.unet, self.text)
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
        states = {"encoder_hidden_states": self.text(beside_empty(self.empty, batch.ids))[0]}
        base = Denoiser.from_states(self.pipe, states, len(noisy), guidance)
        steps = len(self.ratios)
        t, alpha = self.levels(sigma)
        levels = [
            Level(math.sqrt(a), math.sqrt(1 - a), k / steps) for k, a in zip(t.tolist(), alpha.tolist(), strict=True)
        ]
        wide = sigma.view(-1, 1, 1, 1)
        clean, _ = base.estimate(noisy * (1 - alpha).sqrt().view(-1, 1, 1, 1) / wide, levels)
        return (noisy - clean) / wide
