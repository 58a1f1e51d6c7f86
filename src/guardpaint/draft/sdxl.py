"""Stable Diffusion XL: pooled text and time ids ride along in added_cond_kwargs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from guardpaint.draft.family import UNetFamily


class SDXL(UNetFamily):
    name = "sdxl"
    pipelines = (
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLControlNetPipeline",
    )

    def encode_prompt(self, pipe: Any, prompt: str, negative: str, length: int | None = None) -> dict[str, Any]:
        positive, unconditional, pooled, pooled_negative = pipe.encode_prompt(
            prompt, device=pipe._execution_device, negative_prompt=negative, do_classifier_free_guidance=True
        )
        return {
            "encoder_hidden_states": torch.cat([unconditional, positive]),
            "added_cond_kwargs": {"text_embeds": torch.cat([pooled_negative, pooled])},
        }

    def with_text(self, arguments: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
        """As in the base class; both branches get the picture size of the positive one."""
        merged = super().with_text(arguments, text)
        positive = merged["added_cond_kwargs"]["time_ids"][-1]
        merged["added_cond_kwargs"]["time_ids"] = torch.stack([positive, positive])
        return merged
