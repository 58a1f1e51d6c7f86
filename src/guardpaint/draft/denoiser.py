"""The contract of the draft: latents + noise levels → clean estimates, with any supported pipeline's denoiser.

A `Denoiser` is built from a running call (its constructor), from a pipeline and prompts (`from_prompts`), or from
text that is encoded already (`from_states`). All clean estimates of a finished base come from one of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft import schedule
from guardpaint.draft.codec import resize, vae_decode, vae_encode
from guardpaint.draft.conditioning import DenoiserCall
from guardpaint.draft.families import family_of
from guardpaint.draft.family import Family
from guardpaint.draft.tap import Listener, tapped
from guardpaint.errors import BadInput
from guardpaint.types import Level


@dataclass(frozen=True)
class Denoiser:
    """A pipeline's denoiser and VAE with a batch of prompts. Gradients flow unless the caller stops them."""

    pipe: Any
    vae: Any
    family: Family
    calls: Sequence[DenoiserCall]
    """The calls of one step: one; [positive, negative] where FLUX runs true classifier-free guidance; [both branches,
    the positive one without some layers] under SD 3.5's skip-layer guidance."""
    batch: int
    """Images in the batch of the recorded call."""
    image: int | None = None
    """The image of that batch that every latent belongs to. None: latent i belongs to image i."""
    guidance: float | Tensor = 1.0
    """The base's own guidance, one for all latents or one for each; on FLUX, its distilled guidance input."""
    true_cfg: float | Tensor = 1.0
    """FLUX's classifier-free guidance, in addition to the distilled one."""
    rescale: float = 0.0
    """guidance_rescale of SD and SDXL."""
    skip_scale: float = 0.0
    """Scale of SD 3.5's skip-layer guidance, which counts in steps that made its second call."""
    null_embedding: Float[Tensor, "1 l d"] | None = None
    """Text states that replace those of the unconditional branch."""
    levels: tuple[Level, ...] = ()
    """The level that enters each step of the pipeline's call, and the one after the last; from prompts only."""

    @classmethod
    def from_prompts(cls, pipe: Any, prompts: Sequence[str], settings: Mapping[str, Any]) -> Denoiser:
        """Run the pipeline on a batch of prompts up to its first denoiser calls, and keep their conditioning."""
        family = family_of(pipe)
        first = FirstStep(family.calls_per_step(settings))
        with suppress(Begun), tapped(pipe, family, first):
            pipe(list(prompts), generator=torch.Generator().manual_seed(0), **settings)
        steps = schedule.Levels(pipe.scheduler, pipe.num_timesteps)
        steps.locate(pipe.scheduler.timesteps[0])
        return cls(
            pipe,
            pipe.vae,
            family,
            calls=tuple(first.calls),
            batch=len(prompts) * int(settings.get("num_images_per_prompt") or 1),
            **family.guidance_of(pipe),
            true_cfg=float(settings.get("true_cfg_scale", 1.0)),
            levels=tuple(steps.at(k) for k in range(steps.steps + 1)),
        )

    @classmethod
    def from_states(
        cls,
        pipe: Any,
        states: Mapping[str, Any],
        batch: int = 1,
        guidance: float | Tensor = 1.0,
        true_cfg: float | Tensor = 1.0,
    ) -> Denoiser:
        """Encoded text as the denoiser takes it: `batch` rows, or twice as many, [negative, positive]."""
        family = family_of(pipe)
        call = DenoiserCall(getattr(pipe, family.denoiser), (), states)
        if call.rows not in (batch, 2 * batch):
            raise BadInput(f"{call.rows} rows of text for {batch} prompts: give one each, or [negative, positive]")
        calls = family.calls(call, true_cfg) if call.rows == 2 * batch else (call,)
        return cls(pipe, pipe.vae, family, calls, batch, guidance=guidance, true_cfg=true_cfg)

    def with_prompt(self, prompt: str, negative: str, text: Mapping[str, Any] | None = None) -> Denoiser:
        """The same base with this prompt and negative prompt for every latent, always with both branches.

        `text` is what the family's `encode_prompt` says of them, if it was asked before.
        """
        one = replace(self, image=self.image or 0, null_embedding=None, true_cfg=1.0)
        both = one.rows(self.calls[0], 1, (0, 1))
        text = self.family.encode_prompt(self.pipe, prompt, negative) if text is None else text
        both = replace(both, kwargs=self.family.with_text(both.kwargs, text))
        return replace(one, calls=self.family.calls(both, 1.0), batch=1, image=0)

    def with_null_embedding(self, embedding: Float[Tensor, "1 l d"]) -> Denoiser:
        """The same base with other text states in its unconditional branch."""
        return replace(self, null_embedding=embedding)

    def outside_inference(self) -> Denoiser:
        """The same base with copies of the tensors that were made under `torch.inference_mode`."""
        return replace(self, calls=tuple(call.outside_inference() for call in self.calls))

    @property
    def scheduler(self) -> Any:
        return self.pipe.scheduler

    @property
    def prediction(self) -> str:
        return schedule.prediction_type(self.scheduler)

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    @property
    def has_cfg(self) -> bool:
        """Whether a call has an unconditional branch too."""
        return self.calls[0].rows == 2 * self.batch

    @property
    def null_states(self) -> Float[Tensor, "1 l d"]:
        """Text states of the unconditional branch."""
        states: Tensor = self.rows(self.calls[0], 1, (0, 1)).kwargs["encoder_hidden_states"]
        return states[:1]

    def level(self, noise: float) -> Level:
        """The level of a noise time on the model's own training schedule."""
        return schedule.level_at(self.scheduler, noise)

    def estimate(
        self,
        z: Float[Tensor, "n c h w"],
        level: Level | Sequence[Level],
        guidance: float | Tensor | None = None,
        extra: Float[Tensor, "n e h w"] | None = None,
    ) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
        """Clean estimates and implied noise of n latents, each at its own level or all at one.

        Guidance is the base's own unless given, for all latents or for each. `extra` are the channels that an
        inpainting model takes besides the latent; unless given, those of the recorded call, if it had any.
        """
        output = self.output(z, level, guidance, extra)
        if isinstance(level, Level):
            return schedule.split(output, z, level, self.prediction)
        pairs = [schedule.split(o, x, own, self.prediction) for o, x, own in zip(output, z, level, strict=True)]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def output(
        self,
        z: Float[Tensor, "n c h w"],
        level: Level | Sequence[Level],
        guidance: float | Tensor | None = None,
        extra: Float[Tensor, "n e h w"] | None = None,
    ) -> Float[Tensor, "n c h w"]:
        """What the network predicts (noise, velocity, …) under guidance, in fp32; `estimate` takes it apart."""
        levels = [level] * len(z) if isinstance(level, Level) else level
        noise = torch.tensor([a.noise for a in levels], dtype=torch.float64)
        time = self.family.time(noise, self.scheduler.config.num_train_timesteps)
        inputs = z
        if self.prediction != "flow":  # the network saw latents of unit variance in training
            inputs = z / torch.tensor([math.hypot(a.signal, a.sigma) for a in levels]).view(-1, 1, 1, 1).to(z)
        recorded = self.calls[0].extra_channels(int(z.shape[1])) if extra is None else None
        if recorded is not None:
            extra = recorded[torch.tensor(self._images(len(z)))]
        if extra is not None:
            inputs = torch.cat([inputs, extra.to(inputs)], dim=1)
        return self.family.predict(self, inputs, time, guidance)

    def rows(self, call: DenoiserCall, n: int, branches: tuple[int, ...]) -> DenoiserCall:
        """A recorded call cut to n latents per branch (0 negative, 1 positive).

        A call recorded without guidance has one branch, which then stands for both.
        """
        images = self._images(n)
        last = call.rows // self.batch - 1
        cut = call.take(torch.tensor([min(b, last) * self.batch + i for b in branches for i in images]))
        if self.null_embedding is None or branches != (0, 1):
            return cut
        states = cut.kwargs["encoder_hidden_states"]
        null = self.null_embedding.to(states).expand(n, *states.shape[1:])
        return replace(cut, kwargs={**cut.kwargs, "encoder_hidden_states": torch.cat([null, states[n:]])})

    def _images(self, n: int) -> Sequence[int]:
        """The image of the recorded batch that each of n latents belongs to."""
        if self.image is not None or self.batch == 1:
            return [self.image or 0] * n
        if n != self.batch:
            raise BadInput(f"{n} latents for {self.batch} prompts: give one latent for each prompt")
        return range(n)

    def decode(self, z: Float[Tensor, "c h w"]) -> Float[Tensor, "3 H W"]:
        """One picture of a clean latent, by the base's VAE."""
        return vae_decode(self.vae, z[None], self.device)[0]

    def encode(self, image: Float[Tensor, "3 H W"], latent_size: tuple[int, int]) -> Float[Tensor, "c h w"]:
        """Resize to the base's pixel size and encode with the base's VAE."""
        factor = self.pipe.vae_scale_factor
        pixels = resize(image[None], (latent_size[0] * factor, latent_size[1] * factor))
        return vae_encode(self.vae, pixels, self.device)[0]


class Begun(Exception):
    """A pipeline has made the denoiser calls of its first step, which is as far as it needs to run."""


class FirstStep(Listener):
    """Keeps the denoiser calls of a pipeline's first step and then stops the pipeline."""

    def __init__(self, count: int) -> None:
        self.calls: list[DenoiserCall] = []
        self.count = count

    def before_call(self, call: DenoiserCall) -> DenoiserCall:
        self.calls.append(call)
        if len(self.calls) == self.count:
            raise Begun
        return call
