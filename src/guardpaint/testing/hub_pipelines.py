"""Small random-initialised pipelines with the classes and blocks of the published ones that the paper's recipe uses.

They differ from `small` in what a published folder decides: autoencoders that shrink by eight, the blocks of the
denoiser, three text encoders in SD 3.5, the sampler, the safety checker of SD 1.5. Their own size is 64 pixels.
"""

from __future__ import annotations

from typing import Any

from guardpaint.testing import small, small_inpainters
from guardpaint.testing.small import PIXELS, TEXT_WIDTH

FACTOR = 8
LATENT = PIXELS // FACTOR
T5_WIDTH = 2 * TEXT_WIDTH
"""SD 3.5 lays the two CLIP encoders side by side and pads them to the width of T5."""


def autoencoder(channels: int, **config: Any) -> Any:
    """AutoencoderKL with four levels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=PIXELS,
        **config,
    ).eval()


def tiny_decoder(channels: int, **config: Any) -> Any:
    """AutoencoderTiny with four levels, as TAESD."""
    from diffusers import AutoencoderTiny

    return AutoencoderTiny(
        latent_channels=channels,
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        num_encoder_blocks=(1, 3, 3, 3),
        num_decoder_blocks=(3, 3, 3, 1),
        **config,
    ).eval()


def sd_unet(channels: int = 4) -> Any:
    """The UNet of SD 1.5: four levels, text on the upper three."""
    return small.unet(
        channels,
        sample_size=LATENT,
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    )


def sdxl_unet(channels: int = 4) -> Any:
    """The UNet of SDXL: three levels, text on the lower two, and pooled text with sizes beside the time."""
    return small.unet(
        channels,
        sample_size=LATENT,
        block_out_channels=(8, 16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True,
        cross_attention_dim=2 * TEXT_WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=TEXT_WIDTH + 6 * 8,
    )


def noise_schedule() -> dict[str, Any]:
    """Stable Diffusion's noise schedule."""
    return {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def calm_checker() -> Any:
    """The class of Stable Diffusion's own checker; unlike the one of `small_inpainters` it flags no picture."""
    checker = small_inpainters.safety_checker()
    checker.concept_embeds_weights.fill_(2.0)
    checker.special_care_embeds_weights.fill_(2.0)
    return checker


def sd(inpaints: bool = False) -> Any:
    """SD 1.5, or its inpainting model, which is published with another sampler."""
    from diffusers import DDIMScheduler, PNDMScheduler, StableDiffusionInpaintPipeline, StableDiffusionPipeline
    from transformers import CLIPImageProcessorPil

    sampler: Any = PNDMScheduler(**noise_schedule(), skip_prk_steps=True, set_alpha_to_one=False)
    if inpaints:
        sampler = DDIMScheduler(**noise_schedule(), clip_sample=False, set_alpha_to_one=False)
    return (StableDiffusionInpaintPipeline if inpaints else StableDiffusionPipeline)(
        vae=autoencoder(4, scaling_factor=0.18215),
        text_encoder=small.clip_text(),
        tokenizer=small.clip_tokenizer(),
        unet=sd_unet(9 if inpaints else 4),
        scheduler=sampler,
        safety_checker=calm_checker(),
        feature_extractor=CLIPImageProcessorPil(),
        requires_safety_checker=True,
    )


def sdxl(inpaints: bool = False, turbo: bool = False) -> Any:
    """SDXL base, SDXL-Turbo with its sampler, or SDXL inpainting."""
    from diffusers import (
        EulerAncestralDiscreteScheduler,
        EulerDiscreteScheduler,
        StableDiffusionXLInpaintPipeline,
        StableDiffusionXLPipeline,
    )

    sampler: Any = EulerDiscreteScheduler(**noise_schedule(), timestep_spacing="leading")
    if turbo:
        sampler = EulerAncestralDiscreteScheduler(**noise_schedule(), timestep_spacing="trailing")
    return (StableDiffusionXLInpaintPipeline if inpaints else StableDiffusionXLPipeline)(
        vae=autoencoder(4, scaling_factor=0.13025, force_upcast=True),
        text_encoder=small.clip_text(),
        text_encoder_2=small.clip_text(projection=True),
        tokenizer=small.clip_tokenizer(),
        tokenizer_2=small.clip_tokenizer(),
        unet=sdxl_unet(9 if inpaints else 4),
        scheduler=sampler,
        add_watermarker=False,
    )


def t5(width: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    shape = {"d_model": width, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=128, feed_forward_proj="gated-gelu", **shape)).eval()


def sd35(dual_layers: tuple[int, ...] = (0,)) -> Any:
    """SD 3.5: medium has layers of dual attention, large and large turbo have none."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=LATENT,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=32,
        dual_attention_layers=dual_layers,
        qk_norm="rms_norm",
    ).eval()
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flow_autoencoder(scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=small.clip_text(projection=True),
        tokenizer=small.clip_tokenizer(),
        text_encoder_2=small.clip_text(projection=True),
        tokenizer_2=small.clip_tokenizer(),
        text_encoder_3=t5(T5_WIDTH),
        tokenizer_3=small.t5_tokenizer(),
    )


def flow_autoencoder(**config: Any) -> Any:
    return autoencoder(16, use_quant_conv=False, use_post_quant_conv=False, force_upcast=True, **config)


def flux(guided: bool = True) -> Any:
    """FLUX.1-dev, or schnell, which takes no guidance and does not shift its levels with the size."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=64,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=guided,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    shifts = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
    return FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**(shifts if guided else {"shift": 1.0})),
        vae=flow_autoencoder(scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=small.clip_text(),
        tokenizer=small.clip_tokenizer(),
        text_encoder_2=t5(T5_WIDTH),
        tokenizer_2=small.t5_tokenizer(),
    )
