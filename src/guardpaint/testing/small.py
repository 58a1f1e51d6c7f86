"""Small random-initialised instances of the real diffusers classes.

They stand in wherever weights do not matter: tests and `guardpaint doctor`'s self-test.
Their pictures are noise, but the guard meets the same classes and calls as in a real pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel

from guardpaint.audit.model import AuditorConfig, AuditorScorer
from guardpaint.draft.schedule import sd_scheduler
from guardpaint.errors import BadInput
from guardpaint.guard import GuardPaint
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.proposer import ProposerConfig, TournamentProposer

PIXELS = 64
TEXT_WIDTH = 32


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random initialisation by seed, leaving the global RNG as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def clip_tokenizer() -> Any:
    """A real CLIPTokenizer over single bytes."""
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(a + "</w>" for a in alphabet)]
    return CLIPTokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=77, pad_token="<|endoftext|>"
    )


def t5_tokenizer() -> Any:
    """A real T5Tokenizer over single characters."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(c), -3.0) for c in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)


def clip_text(projection: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=514,
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=TEXT_WIDTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def t5_text() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=128, d_model=TEXT_WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    ).eval()


def vae(channels: int) -> Any:
    """AutoencoderKL, factor 4."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=PIXELS,
        scaling_factor=0.5,
        shift_factor=0.1 if channels > 4 else None,
        force_upcast=False,
    ).eval()


def tiny_decoder(channels: int) -> Any:
    """AutoencoderTiny, factor 4."""
    from diffusers import AutoencoderTiny

    return AutoencoderTiny(
        latent_channels=channels,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    ).eval()


def unet(in_channels: int = 4, **kwargs: Any) -> Any:
    from diffusers import UNet2DConditionModel

    shape: dict[str, Any] = {
        "sample_size": PIXELS // 4,
        "in_channels": in_channels,
        "out_channels": 4,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": TEXT_WIDTH,
        "attention_head_dim": 8,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**{**shape, **kwargs}).eval()


def sd(seed: int = 0) -> Any:
    from diffusers import StableDiffusionPipeline

    with seeded(seed):
        return StableDiffusionPipeline(
            vae=vae(4),
            text_encoder=clip_text(),
            tokenizer=clip_tokenizer(),
            unet=unet(),
            scheduler=sd_scheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


def sdxl(seed: int = 0) -> Any:
    from diffusers import StableDiffusionXLPipeline

    with seeded(seed):
        return StableDiffusionXLPipeline(
            vae=vae(4),
            text_encoder=clip_text(),
            text_encoder_2=clip_text(projection=True),
            tokenizer=clip_tokenizer(),
            tokenizer_2=clip_tokenizer(),
            unet=unet(
                cross_attention_dim=2 * TEXT_WIDTH,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=TEXT_WIDTH + 6 * 8,
            ),
            scheduler=sd_scheduler(),
            add_watermarker=False,
        )


def sd3(seed: int = 0) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    with seeded(seed):
        transformer = SD3Transformer2DModel(
            sample_size=PIXELS // 4,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=2 * TEXT_WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=2 * TEXT_WIDTH,
            pos_embed_max_size=32,
        ).eval()
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae(16),
            text_encoder=clip_text(projection=True),
            tokenizer=clip_tokenizer(),
            text_encoder_2=clip_text(projection=True),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=None,
            tokenizer_3=None,
        )


def flux(seed: int = 0) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    with seeded(seed):
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ).eval()
        return FluxPipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.15, use_dynamic_shifting=False),
            vae=vae(16),
            text_encoder=clip_text(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5_text(),
            tokenizer_2=t5_tokenizer(),
        )


BASES: dict[str, Callable[[int], Any]] = {"sd": sd, "sdxl": sdxl, "sd3": sd3, "flux": flux}
LATENT_CHANNELS = {"sd": 4, "sdxl": 4, "sd3": 16, "flux": 16}


def pipeline(family: str, seed: int = 0) -> Any:
    """A small random-initialised pipeline of one family, progress bar off."""
    if family not in BASES:
        raise BadInput(f"base {family!r}: the small random bases are {', '.join(BASES)}")
    pipe = BASES[family](seed)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def inpainter(seed: int = 0) -> Inpainter:
    """A small random-initialised 9-channel inpainter."""
    from diffusers import StableDiffusionInpaintPipeline

    with seeded(seed):
        return Inpainter(
            StableDiffusionInpaintPipeline(
                vae=vae(4),
                text_encoder=clip_text(),
                tokenizer=clip_tokenizer(),
                unet=unet(in_channels=9),
                scheduler=sd_scheduler(),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )
        )


def auditor(seed: int = 0, **shape: Any) -> AuditorScorer:
    """A small random-initialised auditor."""
    with seeded(seed):
        return AuditorScorer(AuditorConfig.tiny(**shape)).eval()


def proposer(seed: int = 0) -> TournamentProposer:
    with seeded(seed):
        return TournamentProposer(ProposerConfig(text_dim=32)).eval()


def guard(seed: int = 0, **config: Any) -> GuardPaint:
    """A complete guard of small random-initialised parts: it runs, it has learned nothing."""
    from guardpaint.config import GuardConfig

    with seeded(seed):
        decoders = {name: tiny_decoder(channels) for name, channels in LATENT_CHANNELS.items()}
    return GuardPaint(auditor(seed), inpainter(seed), proposer(seed), config=GuardConfig(**config), decoders=decoders)
