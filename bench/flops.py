"""Floating-point operations of the models at their published sizes, counted on tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def counted(work: Callable[[], Any]) -> float:
    """Operations of one call, in units of 10¹²."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops()) / 1e12


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def unet(channels: int, side: int, batch: int) -> float:
    """One call of SD 1.5's UNet, or with nine channels of its inpainting UNet."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=64,
            in_channels=channels,
            cross_attention_dim=768,
            attention_head_dim=8,
            block_out_channels=(320, 640, 1280, 1280),
        )
    return counted(lambda: model(empty(batch, channels, side, side), empty(batch), empty(batch, 77, 768)))


def sdxl_step() -> float:
    """One guided step of SDXL at 1024 px."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
            use_linear_projection=True,
        )
    more = {"text_embeds": empty(2, 1280), "time_ids": empty(2, 6)}
    return counted(lambda: model(empty(2, 4, 128, 128), empty(2), empty(2, 77, 2048), added_cond_kwargs=more))


def flux_step() -> float:
    """One step of FLUX.1-dev at 1024 px, with 512 tokens of text."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True)
    return counted(
        lambda: model(
            hidden_states=empty(1, 4096, 64),
            encoder_hidden_states=empty(1, 512, 4096),
            pooled_projections=empty(1, 768),
            timestep=empty(1),
            img_ids=empty(4096, 3),
            txt_ids=empty(512, 3),
            guidance=empty(1),
        )
    )


def vae(latent_channels: int, side: int) -> tuple[float, float]:
    """Encoding and decoding a picture by the published autoencoders' shape."""
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        model = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=latent_channels,
        )
    return (
        counted(lambda: model.encode(empty(1, 3, side, side))),
        counted(lambda: model.decode(empty(1, latent_channels, side // 8, side // 8))),
    )


def tiny_decode(side: int) -> float:
    from diffusers import AutoencoderTiny

    with torch.device("meta"):
        model = AutoencoderTiny()
    return counted(lambda: model.decode(empty(1, 4, side // 8, side // 8)))


STEPS = {"sd15": 50, "sdxl": 50, "flux": 28}
"""Steps of a generation, as the pipelines' own defaults have them."""


def generations() -> dict[str, float]:
    """Operations of a whole generation of each base, with its decode."""
    return {
        "sd15": STEPS["sd15"] * unet(4, 64, 2) + vae(4, 512)[1],
        "sdxl": STEPS["sdxl"] * sdxl_step() + vae(4, 1024)[1],
        "flux": STEPS["flux"] * flux_step() + vae(16, 1024)[1],
    }


if __name__ == "__main__":
    print(generations(), unet(9, 64, 1), vae(4, 512), tiny_decode(512))
