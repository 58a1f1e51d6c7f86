"""Stable Diffusion 3 / 3.5: flow matching with a real classifier-free branch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.conditioning import guided
from guardpaint.draft.family import TransformerFamily
from guardpaint.types import Level

if TYPE_CHECKING:
    from guardpaint.draft.conditioning import BaseModel


class SD3(TransformerFamily):
    name = "sd3"
    pipelines = (
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    )

    def encode_prompt(self, base: BaseModel, prompt: str, negative: str) -> dict[str, Any]:
        positive, unconditional, pooled, pooled_negative = base.pipe.encode_prompt(
            prompt, None, None, device=base.device, negative_prompt=negative
        )
        return {
            "encoder_hidden_states": torch.cat([unconditional, positive]),
            "pooled_projections": torch.cat([pooled_negative, pooled]),
        }

    def predict(
        self, base: BaseModel, z: Float[Tensor, "n c h w"], level: Level, guidance: float | Tensor
    ) -> Float[Tensor, "n c h w"]:
        call = base.calls[0]
        branches = base.branches(call)
        sample = torch.cat([z] * len(branches)).to(call.sample.device, call.sample.dtype)
        t = torch.full((len(sample),), level.sigma * 1000.0, device=sample.device, dtype=sample.dtype)
        kwargs = {**base.rows(call, len(z), branches), "hidden_states": sample, "timestep": t, "return_dict": False}
        output = call.module(**kwargs)[0]
        return guided(output, guidance, output.dim()) if len(branches) == 2 else output
