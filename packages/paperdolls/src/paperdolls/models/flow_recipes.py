"""Flow-matching bases: mini-sd3 learns from scenes, mini-flux from scenes or from a finished pipeline as teacher."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.errors import BadConfig
from paperdolls.models.recipe import (
    Batch,
    GeneratorConfig,
    Latents,
    Recipe,
    clip_text,
    quiet,
    t5_ids,
    t5_text,
    take,
    take_text,
)
from paperdolls.models.teachers import (
    FluxTeacher,
    Sd3Teacher,
    SdTeacher,
    Teacher,
    flux_velocity,
    sd3_texts,
    sd3_velocity,
)


def logit_normal(level: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Turn a uniform number into a σ whose logit is standard normal."""
    return torch.sigmoid(torch.special.ndtri(level.clamp(1e-4, 1 - 1e-4)))


def interpolated(batch: Batch, shift: float) -> tuple[Float[Tensor, " b"], Float[Tensor, "b c h w"]]:
    """σ of each sample, and its latents at σ on the straight line from clean to noise."""
    sigma = logit_normal(batch.level)
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    wide = sigma.view(-1, 1, 1, 1)
    return sigma, (1 - wide) * batch.z + wide * batch.eps


def sd3_encoders(pipe: Any) -> tuple[Any, Any, Any]:
    return pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3


def flux_parts(pipe: Any) -> tuple[Any, Any, Any]:
    return pipe.transformer, pipe.text_encoder, pipe.text_encoder_2


class Sd3(Recipe):
    """StableDiffusion3Pipeline: joint transformer, flow matching, two CLIP encoders and T5."""

    settings: dict[str, Any] = {  # noqa: RUF012
        "num_inference_steps": 25,
        "guidance_scale": 4.0,
    }

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, latents: Latents) -> None:
        super().__init__()
        from diffusers import SD3Transformer2DModel

        self.transformer = SD3Transformer2DModel(
            sample_size=latents.size,
            patch_size=config.patch,
            in_channels=latents.channels,
            out_channels=latents.channels,
            num_layers=config.layers,
            attention_head_dim=config.head_dim,
            num_attention_heads=config.heads,
            joint_attention_dim=config.joint_width,
            caption_projection_dim=config.heads * config.head_dim,
            pooled_projection_dim=2 * config.text_width,
            pos_embed_max_size=latents.size // config.patch,
            qk_norm="rms_norm",
        )
        self.text = clip_text(config, vocab, projection=True)
        self.text2 = clip_text(config, vocab, projection=True)
        self.text3 = t5_text(config, other_vocab)
        self.shift = config.sigma_shift
        self.settings = {**Sd3.settings, "max_sequence_length": config.other_tokens}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        sigma, noisy = interpolated(batch, self.shift)
        text = sd3_texts((self.text, self.text2, self.text3), batch.ids, t5_ids(batch, "sd3"))
        out = sd3_velocity(self.transformer, noisy, sigma, text)
        return {"loss": batch.mean_of((out - (batch.eps - batch.z)) ** 2).mean()}

    @torch.no_grad()
    def adopt(self, pipe: Any) -> None:
        """Take over another mini-sd3's text encoders and every layer that fits; latents and patches may differ.

        CLIP encoders that read fewer tokens are taken over too, but go on learning.
        """
        if type(pipe).__name__ != "StableDiffusion3Pipeline":
            return super().adopt(pipe)
        first, second, third = sd3_encoders(pipe)
        self.text3.load_state_dict(third.state_dict())
        whole = [take_text(self.text, first), take_text(self.text2, second)]
        take(self.transformer, pipe.transformer)
        self.adopted = (self.text, self.text2, self.text3) if all(whole) else ()
        return None

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


def trust(sigma: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Loss weight of a velocity that comes from a noise-predicting teacher: 4·(1 − σ)², at most 1.

    An error e of the teacher's noise is an error e/(1 − σ) of its velocity, so that near σ = 1 most of the squared
    error is the teacher's own.
    """
    return (4 * (1 - sigma) ** 2).clamp(max=1.0)


class Flux(Recipe):
    """FluxPipeline: packed latents, pooled CLIP and T5 states, guidance as an input.

    From scenes it learns guidance 1. From a teacher in the same latent space it learns to predict in one call what the
    teacher predicts under classifier-free guidance, at any strength up to `most_guidance`.
    """

    settings: dict[str, Any] = {  # noqa: RUF012
        "num_inference_steps": 25,
        "guidance_scale": 4.0,
    }

    def __init__(self, config: GeneratorConfig, vocab: int, other_vocab: int, latents: Latents) -> None:
        super().__init__()
        from diffusers import FluxTransformer2DModel

        self.transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * latents.channels,
            num_layers=config.layers,
            num_single_layers=config.single_layers,
            attention_head_dim=config.head_dim,
            num_attention_heads=config.heads,
            joint_attention_dim=config.joint_width,
            pooled_projection_dim=config.text_width,
            guidance_embeds=True,
            axes_dims_rope=tuple(config.rope),
        )
        self.text = clip_text(config, vocab, projection=False)
        self.text2 = t5_text(config, other_vocab)
        size = {"height": latents.pixels, "width": latents.pixels}
        self.settings = {**Flux.settings, **size, "max_sequence_length": config.other_tokens}
        self.most_guidance, self.shift, self.own_words = config.most_guidance, config.sigma_shift, config.own_words
        self.teacher: Teacher | None = None

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        sigma, noisy = interpolated(batch, self.shift)
        text = (self.text2(t5_ids(batch, "flux"))[0], self.text(batch.ids).pooler_output)
        if self.teacher is None:
            guidance, want = torch.ones_like(sigma), batch.eps - batch.z
        else:
            guidance = 1 + (self.most_guidance - 1) * batch.guidance
            want = self.teacher.velocity(batch, noisy, sigma, guidance)
        far = batch.mean_of((flux_velocity(self.transformer, noisy, sigma, text, guidance) - want) ** 2)
        return {"loss": (far * trust(sigma) if isinstance(self.teacher, SdTeacher) else far).mean()}

    def read_with(self, text: Any) -> None:
        try:
            self.text2.load_state_dict(text.state_dict())
        except RuntimeError as error:
            raise BadConfig(f"the input `words` has another shape than this config's T5: {error}") from error

    def learn_from(self, pipe: Any) -> None:
        """Take a finished mini-sd3, mini-sd (whose text encoder is taken over) or mini-flux as the teacher."""
        if type(pipe).__name__ == "FluxPipeline":
            self.teacher = FluxTeacher(pipe)
        elif type(pipe).__name__ == "StableDiffusion3Pipeline":
            self.teacher = Sd3Teacher(pipe)
        elif type(pipe).__name__ == "StableDiffusionPipeline":
            self.teacher = SdTeacher(pipe)
            self.text.load_state_dict(pipe.text_encoder.state_dict())
            self.adopted = (*self.adopted, self.text)
        else:
            super().learn_from(pipe)

    @torch.no_grad()
    def adopt(self, pipe: Any) -> None:
        """Take over all of another mini-flux, or a mini-sd3's T5 and joint layers, with CLIP and patches if they fit.

        After a mini-sd3 the single-stream layers start without effect, and positions (rotary here, added there) have
        to be learned.
        """
        if type(pipe).__name__ == "FluxPipeline":
            mine, theirs = (self.transformer, self.text, self.text2), flux_parts(pipe)
            try:
                for part, other in zip(mine, theirs, strict=True):
                    part.load_state_dict(other.state_dict())
            except RuntimeError as error:
                raise BadConfig(f"the mini-flux to start from has another shape than this config: {error}") from error
            self.adopted = (self.text,) if self.own_words else (self.text, self.text2)
            return None
        if type(pipe).__name__ != "StableDiffusion3Pipeline":
            return super().adopt(pipe)
        ours, theirs = self.transformer, pipe.transformer
        if len(theirs.transformer_blocks) <= len(ours.transformer_blocks):
            raise BadConfig(f"layers={len(ours.transformer_blocks)}: must be fewer than the sd3 model's")
        self.text2.load_state_dict(pipe.text_encoder_3.state_dict())
        self.adopted = self.adopted if self.own_words else (*self.adopted, self.text2)
        for mine, other in zip(ours.transformer_blocks, theirs.transformer_blocks, strict=False):
            take(mine, other)
        for name in ("context_embedder", "norm_out"):
            take(getattr(ours, name), getattr(theirs, name))
        times, other_times = ours.time_text_embed, theirs.time_text_embed
        times.timestep_embedder.load_state_dict(other_times.timestep_embedder.state_dict())
        words = pipe.text_encoder.text_model.state_dict()
        if {k: v.shape for k, v in words.items()} == {k: v.shape for k, v in self.text.state_dict().items()}:
            self.text.load_state_dict(words)
            self.adopted = (*self.adopted, self.text)
            pooled = dict(other_times.text_embedder.state_dict())
            projection = pipe.text_encoder.text_projection.weight
            pooled["linear_1.weight"] = pooled["linear_1.weight"][:, : len(projection)] @ projection
            times.text_embedder.load_state_dict(pooled)
        patch = theirs.pos_embed.proj
        if theirs.config.patch_size == 2 and 4 * theirs.config.in_channels == ours.config.in_channels:
            ours.x_embedder.weight.copy_(patch.weight.flatten(1))
            ours.x_embedder.bias.copy_(patch.bias)
            channels = patch.weight.shape[1]
            for mine, other in zip(ours.proj_out.parameters(), theirs.proj_out.parameters(), strict=True):
                mine.copy_(other.unflatten(0, (4, channels)).transpose(0, 1).flatten(0, 1))
        for block in ours.single_transformer_blocks:
            nn.init.zeros_(block.proj_out.weight)
            nn.init.zeros_(block.proj_out.bias)
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
