"""Stable Diffusion 3 / 3.5: flow matching with a real classifier-free branch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.family import TransformerFamily

if TYPE_CHECKING:
    from guardpaint.draft.denoiser import Denoiser


class SD3(TransformerFamily):
    name = "sd3"
    pipelines = (
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    )

    def encode_prompt(self, pipe: Any, prompt: str, negative: str, length: int | None = None) -> dict[str, Any]:
        tokens = {} if length is None else {"max_sequence_length": length}
        positive, unconditional, pooled, pooled_negative = pipe.encode_prompt(
            prompt, None, None, device=pipe._execution_device, negative_prompt=negative, **tokens
        )
        return {
            "encoder_hidden_states": torch.cat([unconditional, positive]),
            "pooled_projections": torch.cat([pooled_negative, pooled]),
        }

    def guidance_of(self, pipe: Any) -> dict[str, Any]:
        return {**super().guidance_of(pipe), "skip_scale": float(vars(pipe).get("_skip_layer_guidance_scale", 0.0))}

    def adjusted(
        self,
        base: Denoiser,
        mixed: Float[Tensor, "n c h w"],
        positive: Float[Tensor, "n c h w"],
        z: Float[Tensor, "n i h w"],
        time: Float[Tensor, " n"],
    ) -> Float[Tensor, "n c h w"]:
        """Skip-layer guidance, if the step made its second call: away from the prompt's output without some layers."""
        if len(base.calls) == 1:
            return mixed
        call = base.rows(base.calls[1], len(z), (1,))
        skipped = self.output(call.module, z, time, call.conditioning()).float()
        return mixed + base.skip_scale * (positive - skipped)
