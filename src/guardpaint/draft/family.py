"""What differs between pipeline families, one object each; keyed on the pipeline class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft import conditioning
from guardpaint.draft.conditioning import DenoiserCall, guided

if TYPE_CHECKING:
    from guardpaint.draft.denoiser import Denoiser

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

    def guidance_of(self, pipe: Any) -> dict[str, Any]:
        """How the pipeline's running call guides its steps, as fields of `Denoiser`."""
        return {"guidance": self.guidance(pipe)}

    def calls_per_step(self, settings: Mapping[str, Any]) -> int:
        """How often the pipeline calls its denoiser in one step under these settings."""
        return 1

    @abstractmethod
    def encode_prompt(self, pipe: Any, prompt: str, negative: str, length: int | None = None) -> dict[str, Any]:
        """The text arguments of the denoiser for one prompt, rows [negative, positive].

        Where a T5 encodes the text, `length` is its number of tokens; None is the pipeline's own default.
        """

    def with_text(self, arguments: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a recorded call, rows [negative, positive], with another text."""
        return conditioning.with_text(arguments, text)

    def calls(self, both: DenoiserCall, true_cfg: float | Tensor) -> tuple[DenoiserCall, ...]:
        """The calls of one step, from one that holds rows [negative, positive]."""
        return (both,)

    def time(self, noise: Float[Tensor, " n"], steps: int = 1000) -> Float[Tensor, " n"]:
        """The network's time input for noise in [0, 1]: its training timestep, whole or between two."""
        return (noise * steps).float()

    @abstractmethod
    def output(
        self, module: Any, z: Float[Tensor, "n i h w"], time: Float[Tensor, " n"], arguments: Mapping[str, Any]
    ) -> Float[Tensor, "n c h w"]:
        """The network's output for spatial latents, with one row of arguments for each."""

    def predict(
        self, base: Denoiser, z: Float[Tensor, "n i h w"], time: Float[Tensor, " n"], guidance: float | Tensor | None
    ) -> Float[Tensor, "n c h w"]:
        """Guided output in fp32: one network call whose rows are [negative, positive]; None is the base's guidance."""
        branches = (0, 1) if base.has_cfg else (0,)
        call = base.rows(base.calls[0], len(z), branches)
        many = len(branches)
        output = self.output(call.module, torch.cat([z] * many), time.repeat(many), call.conditioning()).float()
        if many == 1:
            return output
        mixed = guided(output, base.guidance if guidance is None else guidance)
        return self.adjusted(base, mixed, output[len(z) :], z, time)

    def adjusted(
        self,
        base: Denoiser,
        mixed: Float[Tensor, "n c h w"],
        positive: Float[Tensor, "n c h w"],
        z: Float[Tensor, "n i h w"],
        time: Float[Tensor, " n"],
    ) -> Float[Tensor, "n c h w"]:
        """What else the pipeline does to a guided output; `positive` is that of the prompt alone."""
        return mixed


def fitting(value: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Latents on the device and in the precision of the text they are denoised under."""
    states = arguments["encoder_hidden_states"]
    return value.to(states.device, states.dtype)


class UNetFamily(Family):
    """SD 1.5 and SDXL: UNet2DConditionModel called as unet(sample, t, encoder_hidden_states=…)."""

    denoiser = "unet"

    def guidance_of(self, pipe: Any) -> dict[str, Any]:
        return {**super().guidance_of(pipe), "rescale": float(vars(pipe).get("_guidance_rescale", 0.0))}

    def adjusted(
        self,
        base: Denoiser,
        mixed: Float[Tensor, "n c h w"],
        positive: Float[Tensor, "n c h w"],
        z: Float[Tensor, "n i h w"],
        time: Float[Tensor, " n"],
    ) -> Float[Tensor, "n c h w"]:
        """Guidance rescale: the guided output gets back some of the spread of the prompt's own output."""
        from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

        return rescale_noise_cfg(mixed, positive, base.rescale) if base.rescale > 0 else mixed

    def output(
        self, module: Any, z: Float[Tensor, "n i h w"], time: Float[Tensor, " n"], arguments: Mapping[str, Any]
    ) -> Float[Tensor, "n c h w"]:
        z = fitting(z, arguments)
        return module(z, time.to(z.device), **{**arguments, "return_dict": False})[0]


class TransformerFamily(Family):
    """SD 3 and FLUX: a transformer called with keyword arguments only."""

    denoiser = "transformer"

    def output(
        self, module: Any, z: Float[Tensor, "n i h w"], time: Float[Tensor, " n"], arguments: Mapping[str, Any]
    ) -> Float[Tensor, "n c h w"]:
        packed = self.pack(fitting(z, arguments))
        inputs = {**arguments, "hidden_states": packed, "timestep": time.to(packed.device), "return_dict": False}
        return self.unpack(module(**inputs)[0], (int(z.shape[-2]), int(z.shape[-1])))
