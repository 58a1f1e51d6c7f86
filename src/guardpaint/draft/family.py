"""What differs between pipeline families, one object each; keyed on the pipeline class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.conditioning import guided, take_rows
from guardpaint.types import Level

if TYPE_CHECKING:
    from guardpaint.draft.conditioning import BaseModel, DenoiserCall

Geometry = tuple[int, int]
"""Latent height and width."""


class Family(ABC):
    """Base behaviour: unpacked latents, one denoiser call per step with [negative, positive] rows."""

    name: str
    pipelines: tuple[str, ...]
    denoiser: str
    default_reinsertion: str = "held_substitution"

    def geometry(self, latents: Tensor, calls: list[DenoiserCall]) -> Geometry:
        return int(latents.shape[-2]), int(latents.shape[-1])

    def unpack(self, latents: Tensor, geometry: Geometry) -> Float[Tensor, "b c h w"]:
        """As the pipeline holds them → spatial."""
        return latents

    def pack(self, latents: Float[Tensor, "b c h w"]) -> Tensor:
        """Spatial → as the pipeline holds them."""
        return latents

    def guidance(self, pipe: Any) -> float:
        return float(pipe.guidance_scale)

    @abstractmethod
    def encode_prompt(self, base: BaseModel, prompt: str, negative: str) -> dict[str, Any]:
        """Denoiser arguments for one prompt, rows [negative, positive]."""

    @abstractmethod
    def predict(
        self, base: BaseModel, z: Float[Tensor, "n c h w"], level: Level, guidance: float | Tensor
    ) -> Float[Tensor, "n c h w"]:
        """Model output for n latents, guidance applied."""


class UNetFamily(Family):
    """SD 1.5 and SDXL: UNet2DConditionModel called as unet(sample, t, encoder_hidden_states=…)."""

    denoiser = "unet"

    def predict(
        self, base: BaseModel, z: Float[Tensor, "n c h w"], level: Level, guidance: float | Tensor
    ) -> Float[Tensor, "n c h w"]:
        call = base.calls[0]
        branches = base.branches(call)
        sample = torch.cat([z] * len(branches)).to(call.sample.device, call.sample.dtype)
        extra = call.sample.shape[1] - z.shape[1]
        if extra > 0:
            rest = take_rows(call.sample, call.sample.shape[0], torch.tensor([base.image] * len(sample)))
            sample = torch.cat([sample, rest[:, -extra:]], dim=1)
        t = round(level.noise * base.scheduler.config.num_train_timesteps)
        kwargs = {**base.rows(call, len(z), branches), "return_dict": False}
        output = call.module(sample, t, **kwargs)[0]
        return guided(output, guidance, output.dim()) if len(branches) == 2 else output


class TransformerFamily(Family):
    """SD 3 and FLUX: a transformer called with keyword arguments only."""

    denoiser = "transformer"
