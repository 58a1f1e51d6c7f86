"""Small random-initialised inpainting pipelines of the real diffusers classes, and few-step LoRAs for them.

Their pictures are noise; they show whether a repairer calls each class as it wants to be called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from guardpaint.draft.loading import LORA
from guardpaint.draft.schedule import sd_scheduler
from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import write_atomic
from guardpaint.testing import small
from guardpaint.testing.small import PIXELS, TEXT_WIDTH, seeded


def sd(channels: int = 9, checker: bool = False) -> Any:
    """StableDiffusionInpaintPipeline; with a safety checker it has all the folders of a stock SD 1.5 repository."""
    from diffusers import StableDiffusionInpaintPipeline
    from transformers import CLIPImageProcessorPil

    return StableDiffusionInpaintPipeline(
        vae=small.vae(4),
        text_encoder=small.clip_text(),
        tokenizer=small.clip_tokenizer(),
        unet=small.unet(in_channels=channels),
        scheduler=sd_scheduler(),
        safety_checker=safety_checker() if checker else None,
        feature_extractor=CLIPImageProcessorPil() if checker else None,
        requires_safety_checker=checker,
    )


def safety_checker() -> Any:
    """The class of Stable Diffusion's own checker; it flags every picture."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    checker = StableDiffusionSafetyChecker(
        CLIPConfig(vision_config={**vision, "image_size": 224, "patch_size": 112}, projection_dim=8)
    ).eval()
    checker.concept_embeds_weights.fill_(-2.0)
    return checker


def sdxl(channels: int = 9) -> Any:
    """StableDiffusionXLInpaintPipeline."""
    from diffusers import StableDiffusionXLInpaintPipeline

    return StableDiffusionXLInpaintPipeline(
        vae=small.vae(4),
        text_encoder=small.clip_text(),
        text_encoder_2=small.clip_text(projection=True),
        tokenizer=small.clip_tokenizer(),
        tokenizer_2=small.clip_tokenizer(),
        unet=small.unet(
            in_channels=channels,
            cross_attention_dim=2 * TEXT_WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=TEXT_WIDTH + 6 * 8,
        ),
        scheduler=sd_scheduler(),
        add_watermarker=False,
    )


def sd3(channels: int = 16) -> Any:
    """StableDiffusion3InpaintPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3InpaintPipeline

    transformer = SD3Transformer2DModel(
        sample_size=PIXELS // 4,
        patch_size=2,
        in_channels=channels,
        out_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=32,
    ).eval()
    return StableDiffusion3InpaintPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=small.vae(16),
        text_encoder=small.clip_text(projection=True),
        tokenizer=small.clip_tokenizer(),
        text_encoder_2=small.clip_text(projection=True),
        tokenizer_2=small.clip_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def flux(fill: bool, guided: bool = True) -> Any:
    """FluxFillPipeline or FluxInpaintPipeline; `guided` models take guidance as an input, as all but schnell do."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        FluxFillPipeline,
        FluxInpaintPipeline,
        FluxTransformer2DModel,
    )

    vae = small.vae(16)
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * (2 * 16 + factor**2) if fill else 64,
        out_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=guided,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    return (FluxFillPipeline if fill else FluxInpaintPipeline)(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.15, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=small.clip_text(),
        tokenizer=small.clip_tokenizer(),
        text_encoder_2=small.t5_text(),
        tokenizer_2=small.t5_tokenizer(),
    )


INPAINTERS: dict[str, Callable[[], Any]] = {
    "sd": sd,
    "sd-plain": lambda: sd(4),
    "sdxl": sdxl,
    "sdxl-plain": lambda: sdxl(4),
    "sd3": sd3,
    "sd3-masked": lambda: sd3(33),
    "flux-fill": lambda: flux(fill=True),
    "flux": lambda: flux(fill=False),
    "flux-schnell": lambda: flux(fill=False, guided=False),
}


def inpainting(kind: str, seed: int = 0) -> Any:
    """A small random-initialised inpainting pipeline, progress bar off."""
    if kind not in INPAINTERS:
        raise BadInput(f"inpainting pipeline {kind!r}: the small random ones are {', '.join(INPAINTERS)}")
    with seeded(seed):
        pipe = INPAINTERS[kind]()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def random_lora(pipe: Any, folder: Path, file: str = LORA, seed: int = 0) -> Path:
    """Write a random LoRA for the attention of a pipeline's denoiser, as few-step adapters are published."""
    from safetensors.torch import save

    name = "unet" if "unet" in pipe.components else "transformer"
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in pipe.components[name].named_modules():
        if path.endswith(("to_q", "to_v")):
            rows, columns = module.weight.shape
            tensors[f"{name}.{path}.lora_A.weight"] = torch.randn(2, columns, generator=g)
            tensors[f"{name}.{path}.lora_B.weight"] = torch.randn(rows, 2, generator=g)
    write_atomic(folder / file, save(tensors))
    return folder
