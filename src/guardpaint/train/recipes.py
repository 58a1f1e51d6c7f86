"""The base models of the paper-doll world: what each is made of, its loss, and the pipeline it becomes.

A recipe owns its denoiser and the text encoders trained with it. `losses` follows the family's own objective
(ε with min-SNR weights, or flow-matching velocity); text is encoded exactly as the family's pipeline does it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.draft import flux
from guardpaint.draft.conditioning import guided
from guardpaint.draft.schedule import sd_scheduler
from guardpaint.errors import BadConfig
from guardpaint.train.latents import tokenise

PIXELS = 64
LONG_TEXT = {"sd3": 256, "flux": 512}
"""T5 length of the pipelines unless `max_sequence_length` says otherwise."""


@dataclass(frozen=True)
class GeneratorConfig:
    """Shape of a generator and of its text encoders."""

    family: str = "sd"
    channels: tuple[int, ...] = (64, 96, 128)
    """UNet widths, full resolution first."""
    layers: int = 5
    """Transformer: joint layers."""
    single_layers: int = 0
    """Transformer (flux): single-stream layers after the joint ones."""
    heads: int = 6
    head_dim: int = 32
    rope: tuple[int, ...] = (8, 12, 12)
    """Transformer (flux): how the head's channels are shared among the three position axes."""
    text_width: int = 96
    text_layers: int = 2
    tokens: int = 48
    other_tokens: int = 40
    """Length of the T5 text, for families that have one."""
    merges: int = 1000
    scenes: int = 40_000
    captions: int = 4
    caption_drop: float = 0.10
    min_snr: float = 5.0
    sigma_shift: float = 1.0
    """Flow models: above 1, more of the training happens at high noise, where the composition is decided."""
    most_guidance: float = 6.0
    """Guidance values that a taught flux learns lie in [1, this]."""
    long_text: float = 0.0
    """Share of steps with the T5 length which the family's pipeline takes by default."""

    def __post_init__(self) -> None:
        if self.family not in RECIPES:
            raise BadConfig(f"family={self.family!r}: choose one of {', '.join(RECIPES)}")
        if not 0 <= self.caption_drop < 1 or not 0 <= self.long_text <= 1:
            raise BadConfig(f"caption_drop={self.caption_drop}, long_text={self.long_text}: shares within [0, 1)")
        if self.family == "flux" and sum(self.rope) != self.head_dim:
            raise BadConfig(f"rope={self.rope} must add up to head_dim={self.head_dim}")


@dataclass(frozen=True)
class Batch:
    """One step's data, drawn from (seed, step) alone."""

    z: Float[Tensor, "b c h w"]
    eps: Float[Tensor, "b c h w"]
    level: Float[Tensor, " b"]
    """Stratified in [0, 1): the recipe turns it into a timestep or a σ."""
    ids: Int[Tensor, "b l"]
    other_ids: Int[Tensor, "b m"] | None
    """The same captions in the family's second tokenizer."""
    mask: Float[Tensor, "b 1 h w"] | None
    masked: Float[Tensor, "b c h w"] | None
    long: bool
    """Pad the T5 text to the pipeline's default length in this step."""
    guidance: Float[Tensor, " b"]
    """Stratified in [0, 1): how strong the guidance is that a taught model follows."""


class Recipe(nn.Module, ABC):
    """A trainable base model."""

    settings: dict[str, Any]
    """What to call the finished pipeline with."""

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, Tensor]: ...

    @abstractmethod
    def assemble(self, vae: Any, tokenizer: Any, other_tokenizer: Any = None) -> Any:
        """The diffusers pipeline of these parts, progress bar off."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.losses(batch)

    def adopt(self, pipe: Any) -> None:
        """Take over from a finished pipeline what this recipe can use."""
        raise BadConfig(f"{type(self).__name__} cannot start from {type(pipe).__name__}")

    adopted: tuple[nn.Module, ...] = ()
    """Parts taken over as they are: used, not trained, and stored once for both models."""

    def learn_from(self, pipe: Any) -> None:
        """Imitate a finished pipeline instead of the scenes alone."""
        raise BadConfig(f"{type(self).__name__} cannot be taught by {type(pipe).__name__}")


def min_snr_weight(alpha: Float[Tensor, " b"], gamma: float) -> Float[Tensor, " b"]:
    """min(SNR, γ)/SNR for ε-prediction (SPEC §4)."""
    snr = alpha / (1 - alpha)
    return snr.clamp(max=gamma) / snr


def logit_normal(level: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """σ whose logit is standard normal, from a uniform number."""
    return torch.sigmoid(torch.special.ndtri(level.clamp(1e-4, 1 - 1e-4)))


def clip_text(config: GeneratorConfig, vocab: int, *, projection: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    shape = CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=config.text_width,
        intermediate_size=4 * config.text_width,
        num_hidden_layers=config.text_layers,
        num_attention_heads=4,
        max_position_embeddings=config.tokens,
        projection_dim=config.text_width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(shape) if projection else CLIPTextModel(shape)


def t5_text(config: GeneratorConfig, vocab: int, width: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=vocab,
            d_model=width,
            d_kv=width // 4,
            d_ff=2 * width,
            num_layers=config.text_layers,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


def t5_ids(batch: Batch, family: str) -> Int[Tensor, "b m"]:
    """The batch's T5 text, in a long step padded to the pipeline's default length (pad id 0)."""
    if batch.other_ids is None:
        raise BadConfig(f"{family} needs its captions in both tokenizers")
    more = LONG_TEXT[family] - batch.other_ids.shape[1] if batch.long else 0
    return nn.functional.pad(batch.other_ids, (0, more), value=0)


def unet(config: GeneratorConfig, latent_channels: int, size: int, in_channels: int, text: int, **extra: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=size,
        in_channels=in_channels,
        out_channels=latent_channels,
        block_out_channels=tuple(config.channels),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=text,
        attention_head_dim=16,
        norm_num_groups=16,
        **extra,
    )


class Sd(Recipe):
    """StableDiffusionPipeline: ε-prediction, one CLIP text encoder."""

    settings: dict[str, Any] = {  # noqa: RUF012
        "num_inference_steps": 25,
        "guidance_scale": 4.0,
    }
    pipeline = "StableDiffusionPipeline"

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, channels: int, size: int) -> None:
        super().__init__()
        self.gamma = config.min_snr
        self.unet = self.denoiser(config, channels, size)
        self.text = clip_text(config, vocab, projection=False)
        self.alphas: Tensor
        self.register_buffer("alphas", sd_scheduler().alphas_cumprod, persistent=False)

    def denoiser(self, config: GeneratorConfig, channels: int, size: int) -> Any:
        return unet(config, channels, size, channels, config.text_width)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        t, noisy = self.noised(batch)
        out = self.unet(noisy, t, encoder_hidden_states=self.text(batch.ids).last_hidden_state).sample
        return self.weighted(out, batch, t)

    def adopt(self, pipe: Any) -> None:
        """A finished mini-sd's network and words. Inputs it does not have (mask, pooled text) start without effect."""
        if not hasattr(pipe, "unet"):
            return super().adopt(pipe)
        widen(self.unet, pipe.unet)
        self.text.load_state_dict(pipe.text_encoder.float().state_dict())
        self.adopted = (self.text,)
        return None

    def noised(self, batch: Batch) -> tuple[Int[Tensor, " b"], Float[Tensor, "b c h w"]]:
        t = (batch.level * len(self.alphas)).long()
        alpha = self.alphas[t].view(-1, 1, 1, 1)
        return t, (alpha.sqrt() * batch.z + (1 - alpha).sqrt() * batch.eps).contiguous(
            memory_format=torch.channels_last
        )

    def weighted(self, out: Tensor, batch: Batch, t: Tensor) -> dict[str, Tensor]:
        error = ((out - batch.eps) ** 2).mean((1, 2, 3))
        return {"loss": (min_snr_weight(self.alphas[t], self.gamma) * error).mean(), "mse": error.mean()}

    def assemble(self, vae: Any, tokenizer: Any, other_tokenizer: Any = None) -> Any:
        import diffusers

        return quiet(
            getattr(diffusers, self.pipeline)(
                vae=vae,
                text_encoder=self.text,
                tokenizer=tokenizer,
                unet=self.unet,
                scheduler=sd_scheduler(),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )
        )


class Inpaint(Sd):
    """StableDiffusionInpaintPipeline: nine channels, starting from a finished mini-sd and sharing its text encoder."""

    pipeline = "StableDiffusionInpaintPipeline"

    def denoiser(self, config: GeneratorConfig, channels: int, size: int) -> Any:
        return unet(config, channels, size, 2 * channels + 1, config.text_width)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        if batch.mask is None or batch.masked is None:
            raise BadConfig("an inpainter trains on masked scenes: encode them with masks")
        t, noisy = self.noised(batch)
        states = self.text(batch.ids).last_hidden_state
        both = torch.cat([noisy, batch.mask, batch.masked], 1).contiguous(memory_format=torch.channels_last)
        return self.weighted(self.unet(both, t, encoder_hidden_states=states).sample, batch, t)


class Sdxl(Sd):
    """StableDiffusionXLPipeline: two text encoders, pooled text and size ids."""

    TIME_WIDTH = 16

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, channels: int, size: int) -> None:
        super().__init__(config, vocab, other_vocab, channels, size)
        self.text2 = clip_text(config, vocab, projection=True)

    def denoiser(self, config: GeneratorConfig, channels: int, size: int) -> Any:
        return unet(
            config,
            channels,
            size,
            channels,
            2 * config.text_width,
            addition_embed_type="text_time",
            addition_time_embed_dim=self.TIME_WIDTH,
            projection_class_embeddings_input_dim=config.text_width + 6 * self.TIME_WIDTH,
        )

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        t, noisy = self.noised(batch)
        first, second = (e(batch.ids, output_hidden_states=True) for e in (self.text, self.text2))
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        sizes = torch.tensor([[PIXELS, PIXELS, 0, 0, PIXELS, PIXELS]], dtype=states.dtype).repeat(len(states), 1)
        extra = {"text_embeds": second.text_embeds, "time_ids": sizes}
        out = self.unet(noisy, t, encoder_hidden_states=states, added_cond_kwargs=extra).sample
        return self.weighted(out, batch, t)

    def assemble(self, vae: Any, tokenizer: Any, other_tokenizer: Any = None) -> Any:
        from diffusers import StableDiffusionXLPipeline

        return quiet(
            StableDiffusionXLPipeline(
                vae=vae,
                text_encoder=self.text,
                text_encoder_2=self.text2,
                tokenizer=tokenizer,
                tokenizer_2=tokenizer,
                unet=self.unet,
                scheduler=sd_scheduler(),
                force_zeros_for_empty_prompt=False,
                add_watermarker=False,
            )
        )


@torch.no_grad()
def widen(net: nn.Module, source: nn.Module) -> None:
    """Take over a network's weights; where `net` takes more inputs, the new ones start without effect."""
    for name, value in source.float().state_dict().items():
        target = net.get_parameter(name)
        if target.shape[0] != value.shape[0] or target.dim() != value.dim():
            raise BadConfig(f"{name}: {tuple(value.shape)} does not fit into {tuple(target.shape)}; use equal channels")
        target.zero_()
        target[:, : value.shape[1]].copy_(value) if value.dim() > 1 else target.copy_(value)


Text = tuple[Float[Tensor, "b tokens width"], Float[Tensor, "b pooled"]]
"""Prompt states and pooled text."""


def interpolated(batch: Batch, shift: float) -> tuple[Float[Tensor, " b"], Float[Tensor, "b c h w"]]:
    """σ and the latents at it, on the straight line from clean to noise."""
    sigma = logit_normal(batch.level)
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    wide = sigma.view(-1, 1, 1, 1)
    return sigma, (1 - wide) * batch.z + wide * batch.eps


def sd3_texts(encoders: tuple[Any, Any, Any], ids: Int[Tensor, "b l"], other_ids: Int[Tensor, "b m"]) -> Text:
    """CLIP states side by side, then T5's; pooled CLIP texts."""
    first, second = (e(ids, output_hidden_states=True) for e in encoders[:2])
    states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
    states = torch.cat([states, encoders[2](other_ids)[0]], 1)
    return states, torch.cat([first.text_embeds, second.text_embeds], -1)


def sd3_velocity(
    net: Any, z: Float[Tensor, "b c h w"], sigma: Float[Tensor, " b"], text: Text
) -> Float[Tensor, "b c h w"]:
    return net(z, encoder_hidden_states=text[0], pooled_projections=text[1], timestep=sigma * 1000).sample


def flux_velocity(
    net: Any,
    z: Float[Tensor, "b c h w"],
    sigma: Float[Tensor, " b"],
    text: Text,
    guidance: Float[Tensor, " b"],
) -> Float[Tensor, "b c h w"]:
    """On unpacked latents."""
    from diffusers import FluxPipeline

    family = flux.Flux()
    b, _, h, w = z.shape
    out = net(
        hidden_states=family.pack(z),
        timestep=sigma,
        guidance=guidance,
        pooled_projections=text[1],
        encoder_hidden_states=text[0],
        txt_ids=torch.zeros(text[0].shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, z.device, z.dtype),
    ).sample
    return family.unpack(out, (h, w))


class Sd3(Recipe):
    """StableDiffusion3Pipeline: joint transformer, flow matching, two CLIP encoders and T5."""

    settings: dict[str, Any] = {  # noqa: RUF012
        "num_inference_steps": 25,
        "guidance_scale": 4.0,
    }

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, channels: int, size: int) -> None:
        super().__init__()
        from diffusers import SD3Transformer2DModel

        self.transformer = SD3Transformer2DModel(
            sample_size=size,
            patch_size=2,
            in_channels=channels,
            out_channels=channels,
            num_layers=config.layers,
            attention_head_dim=config.head_dim,
            num_attention_heads=config.heads,
            joint_attention_dim=2 * config.text_width,
            caption_projection_dim=config.heads * config.head_dim,
            pooled_projection_dim=2 * config.text_width,
            pos_embed_max_size=size // 2,
            qk_norm="rms_norm",
        )
        self.text = clip_text(config, vocab, projection=True)
        self.text2 = clip_text(config, vocab, projection=True)
        self.text3 = t5_text(config, other_vocab, 2 * config.text_width)
        self.shift = config.sigma_shift
        self.settings = {**Sd3.settings, "max_sequence_length": config.other_tokens}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        sigma, noisy = interpolated(batch, self.shift)
        text = sd3_texts((self.text, self.text2, self.text3), batch.ids, t5_ids(batch, "sd3"))
        out = sd3_velocity(self.transformer, noisy, sigma, text)
        return {"loss": ((out - (batch.eps - batch.z)) ** 2).mean()}

    def assemble(self, vae: Any, tokenizer: Any, other_tokenizer: Any = None) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

        return quiet(
            StableDiffusion3Pipeline(
                transformer=self.transformer,
                scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
                vae=vae,
                text_encoder=self.text,
                tokenizer=tokenizer,
                text_encoder_2=self.text2,
                tokenizer_2=tokenizer,
                text_encoder_3=self.text3,
                tokenizer_3=other_tokenizer,
            )
        )


class Flux(Recipe):
    """FluxPipeline: packed latents, pooled CLIP and T5 states, guidance as an input.

    From scenes alone it learns guidance 1. Taught by a finished mini-sd3 it learns what that one says under
    classifier-free guidance, at any strength up to `most_guidance`, in one call.
    """

    settings: dict[str, Any] = {  # noqa: RUF012
        "num_inference_steps": 25,
        "guidance_scale": 4.0,
        "height": PIXELS,
        "width": PIXELS,
    }

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, channels: int, size: int) -> None:
        super().__init__()
        from diffusers import FluxTransformer2DModel

        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * channels,
            num_layers=config.layers,
            num_single_layers=config.single_layers,
            attention_head_dim=config.head_dim,
            num_attention_heads=config.heads,
            joint_attention_dim=2 * config.text_width,
            pooled_projection_dim=config.text_width,
            guidance_embeds=True,
            axes_dims_rope=tuple(config.rope),
        )
        self.text = clip_text(config, vocab, projection=False)
        self.text2 = t5_text(config, other_vocab, 2 * config.text_width)
        self.settings = {**Flux.settings, "max_sequence_length": config.other_tokens}
        self.most_guidance, self.shift = config.most_guidance, config.sigma_shift
        self.teacher: tuple[Any, tuple[Any, Any, Any], Tensor, Tensor] | None = None

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        sigma, noisy = interpolated(batch, self.shift)
        text = (self.text2(t5_ids(batch, "flux"))[0], self.text(batch.ids).pooler_output)
        if self.teacher is None:
            guidance, want = torch.ones_like(sigma), batch.eps - batch.z
        else:
            guidance = 1 + (self.most_guidance - 1) * batch.guidance
            want = self.lesson(batch, noisy, sigma, guidance)
        return {"loss": ((flux_velocity(self.transformer, noisy, sigma, text, guidance) - want) ** 2).mean()}

    @torch.no_grad()
    def lesson(self, batch: Batch, noisy: Tensor, sigma: Tensor, guidance: Tensor) -> Float[Tensor, "b c h w"]:
        """What the teacher says under classifier-free guidance."""
        assert self.teacher is not None and batch.other_ids is not None
        net, encoders, empty, other_empty = self.teacher
        n = len(noisy)
        ids = torch.cat([empty.expand(n, -1), batch.ids])
        text = sd3_texts(encoders, ids, torch.cat([other_empty.expand(n, -1), batch.other_ids]))
        both = sd3_velocity(net, noisy.repeat(2, 1, 1, 1), sigma.repeat(2), text)
        return guided(both, guidance, both.dim())

    def learn_from(self, pipe: Any) -> None:
        if type(pipe).__name__ != "StableDiffusion3Pipeline":
            return super().learn_from(pipe)
        encoders = (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
        for part in (pipe.transformer, *encoders):
            part.requires_grad_(False).eval()
        empty, other_empty = tokenise(pipe.tokenizer, [""]), tokenise(pipe.tokenizer_3, [""])
        self.teacher = (pipe.transformer, encoders, empty, other_empty)
        return None

    @torch.no_grad()
    def adopt(self, pipe: Any) -> None:
        """mini-sd3's words and joint layers.

        The single-stream layers start without effect; positions (rotary here, added there) are still to be learned.
        """
        if type(pipe).__name__ != "StableDiffusion3Pipeline":
            return super().adopt(pipe)
        ours, theirs = self.transformer, pipe.transformer
        if len(theirs.transformer_blocks) <= len(ours.transformer_blocks):
            raise BadConfig(f"layers={len(ours.transformer_blocks)}: must be fewer than the sd3 model's")
        self.text.load_state_dict(pipe.text_encoder.text_model.state_dict())
        self.text2.load_state_dict(pipe.text_encoder_3.state_dict())
        for mine, other in zip(ours.transformer_blocks, theirs.transformer_blocks, strict=False):
            mine.load_state_dict(other.state_dict())
        for name in ("context_embedder", "norm_out"):
            getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
        times, other_times = ours.time_text_embed, theirs.time_text_embed
        times.timestep_embedder.load_state_dict(other_times.timestep_embedder.state_dict())
        pooled = dict(other_times.text_embedder.state_dict())
        projection = pipe.text_encoder.text_projection.weight
        pooled["linear_1.weight"] = pooled["linear_1.weight"][:, : len(projection)] @ projection
        times.text_embedder.load_state_dict(pooled)
        patch = theirs.pos_embed.proj
        ours.x_embedder.weight.copy_(patch.weight.flatten(1))
        ours.x_embedder.bias.copy_(patch.bias)
        channels = patch.weight.shape[1]
        for mine, other in zip(ours.proj_out.parameters(), theirs.proj_out.parameters(), strict=True):
            mine.copy_(other.unflatten(0, (4, channels)).transpose(0, 1).flatten(0, 1))
        for block in ours.single_transformer_blocks:
            nn.init.zeros_(block.proj_out.weight)
            nn.init.zeros_(block.proj_out.bias)
        self.adopted = (self.text, self.text2)
        return None

    def assemble(self, vae: Any, tokenizer: Any, other_tokenizer: Any = None) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        return quiet(
            FluxPipeline(
                transformer=self.transformer,
                scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
                vae=vae,
                text_encoder=self.text,
                tokenizer=tokenizer,
                text_encoder_2=self.text2,
                tokenizer_2=other_tokenizer,
            )
        )


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


RECIPES: dict[str, Callable[..., Recipe]] = {"sd": Sd, "inpaint": Inpaint, "sdxl": Sdxl, "sd3": Sd3, "flux": Flux}


def build(config: GeneratorConfig, vocab: int, other_vocab: int, channels: int, size: int, seed: int) -> Recipe:
    """A random-initialised recipe, by seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RECIPES[config.family](config, vocab, other_vocab, channels, size)
