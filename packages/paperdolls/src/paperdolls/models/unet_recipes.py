"""UNet bases: mini-sd, mini-inpaint, mini-sdxl. ε-prediction with min-SNR weights."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.draft.schedule import sd_scheduler
from guardpaint.errors import BadConfig
from guardpaint.train.alignment_loss import min_snr_weight
from paperdolls.models.recipe import Batch, GeneratorConfig, Latents, Recipe, clip_text, quiet


def unet(config: GeneratorConfig, latents: Latents, in_channels: int, text: int, **extra: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=latents.size,
        in_channels=in_channels,
        out_channels=latents.channels,
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

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, latents: Latents) -> None:
        super().__init__()
        self.gamma = config.min_snr
        self.unet = self.denoiser(config, latents)
        self.text = clip_text(config, vocab, projection=False)
        self.alphas: Tensor
        self.register_buffer("alphas", sd_scheduler().alphas_cumprod, persistent=False)

    def denoiser(self, config: GeneratorConfig, latents: Latents) -> Any:
        return unet(config, latents, latents.channels, config.text_width)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        t, noisy = self.noised(batch)
        out = self.unet(noisy, t, encoder_hidden_states=self.text(batch.ids).last_hidden_state).sample
        return self.weighted(out, batch, t)

    def adopt(self, pipe: Any) -> None:
        """Take over a finished UNet and text encoder. Inputs that it lacks (mask, pooled text) start without effect."""
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
        error = batch.mean_of((out - batch.eps) ** 2)
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

    def denoiser(self, config: GeneratorConfig, latents: Latents) -> Any:
        return unet(config, latents, 2 * latents.channels + 1, config.text_width)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        if batch.mask is None or batch.masked is None:
            raise BadConfig("the scenes of an inpainter need masks: encode them with `masks` of at least 1")
        t, noisy = self.noised(batch)
        states = self.text(batch.ids).last_hidden_state
        both = torch.cat([noisy, batch.mask, batch.masked], 1).contiguous(memory_format=torch.channels_last)
        return self.weighted(self.unet(both, t, encoder_hidden_states=states).sample, batch, t)


class Sdxl(Sd):
    """StableDiffusionXLPipeline: two text encoders, pooled text and size ids."""

    TIME_WIDTH = 16

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, latents: Latents) -> None:
        super().__init__(config, vocab, other_vocab, latents)
        self.pixels = latents.pixels
        self.text2 = clip_text(config, vocab, projection=True)

    def adopt(self, pipe: Any) -> None:
        """Take over a mini-sd's UNet and text encoder, or everything of another mini-sdxl."""
        super().adopt(pipe)
        if hasattr(pipe, "text_encoder_2"):
            self.text2.load_state_dict(pipe.text_encoder_2.float().state_dict())
            self.adopted = (self.text, self.text2)

    def denoiser(self, config: GeneratorConfig, latents: Latents) -> Any:
        return unet(
            config,
            latents,
            latents.channels,
            2 * config.text_width,
            addition_embed_type="text_time",
            addition_time_embed_dim=self.TIME_WIDTH,
            projection_class_embeddings_input_dim=config.text_width + 6 * self.TIME_WIDTH,
        )

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        t, noisy = self.noised(batch)
        first, second = (e(batch.ids, output_hidden_states=True) for e in (self.text, self.text2))
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        side = self.pixels
        sizes = torch.tensor([[side, side, 0, 0, side, side]], dtype=states.dtype).repeat(len(states), 1)
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
    """Copy a network's weights into `net`; inputs that only `net` has start without effect."""
    for name, value in source.float().state_dict().items():
        target = net.get_parameter(name)
        if target.shape[0] != value.shape[0] or target.dim() != value.dim():
            raise BadConfig(f"{name}: {tuple(value.shape)} does not fit into {tuple(target.shape)}; use equal channels")
        target.zero_()
        target[:, : value.shape[1]].copy_(value) if value.dim() > 1 else target.copy_(value)
