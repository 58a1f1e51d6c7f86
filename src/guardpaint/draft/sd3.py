"""Stable Diffusion 3 / 3.5: flow matching with a real classifier-free branch."""

from __future__ import annotations

from typing import Any

import torch

from guardpaint.draft.family import TransformerFamily


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
