"""Stable Diffusion XL: pooled text and time ids ride along in added_cond_kwargs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from guardpaint.draft.family import UNetFamily

if TYPE_CHECKING:
    from guardpaint.draft.conditioning import BaseModel


class SDXL(UNetFamily):
    name = "sdxl"
    pipelines = (
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
    )

    def encode_prompt(self, base: BaseModel, prompt: str, negative: str) -> dict[str, Any]:
        positive, unconditional, pooled, pooled_negative = base.pipe.encode_prompt(
            prompt, device=base.device, negative_prompt=negative, do_classifier_free_guidance=True
        )
        recorded = base.calls[0].kwargs["added_cond_kwargs"]["time_ids"][base.image - base.batch]
        return {
            "encoder_hidden_states": torch.cat([unconditional, positive]),
            "added_cond_kwargs": {
                "text_embeds": torch.cat([pooled_negative, pooled]),
                "time_ids": torch.stack([recorded, recorded]),
            },
        }
