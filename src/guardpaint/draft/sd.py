"""Stable Diffusion 1.x / 2.x."""

from __future__ import annotations

from typing import Any

import torch

from guardpaint.draft.family import UNetFamily


class SD(UNetFamily):
    name = "sd"
    pipelines = (
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "StableDiffusionControlNetPipeline",
    )

    def encode_prompt(self, pipe: Any, prompt: str, negative: str, length: int | None = None) -> dict[str, Any]:
        positive, unconditional = pipe.encode_prompt(prompt, pipe._execution_device, 1, True, negative)
        return {"encoder_hidden_states": torch.cat([unconditional, positive])}
