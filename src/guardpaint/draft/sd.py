"""Stable Diffusion 1.x / 2.x."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from guardpaint.draft.family import UNetFamily

if TYPE_CHECKING:
    from guardpaint.draft.conditioning import BaseModel


class SD(UNetFamily):
    name = "sd"
    pipelines = (
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "StableDiffusionControlNetPipeline",
    )

    def encode_prompt(self, base: BaseModel, prompt: str, negative: str) -> dict[str, Any]:
        positive, unconditional = base.pipe.encode_prompt(prompt, base.device, 1, True, negative)
        return {"encoder_hidden_states": torch.cat([unconditional, positive])}
