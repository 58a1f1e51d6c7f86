"""The frozen base as a function: latent + noise level → clean estimate, by replaying its own call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft import schedule
from guardpaint.draft.codec import resize, vae_decode, vae_encode
from guardpaint.types import Level

if TYPE_CHECKING:
    from guardpaint.draft.family import Family

SHARED_ROWS = ("img_ids", "txt_ids")
"""Arguments whose first axis is a sequence, not the batch."""


@dataclass(frozen=True)
class DenoiserCall:
    """One call of the base's UNet or transformer, as the pipeline made it."""

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def sample(self) -> Tensor:
        if self.args:
            return self.args[0]
        return self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.kwargs["sample"]


def take_rows(value: Any, rows: int, index: Tensor, name: str = "") -> Any:
    """Select batch rows in every tensor of a nested argument."""
    if isinstance(value, Tensor):
        if name in SHARED_ROWS or value.dim() == 0 or value.shape[0] != rows:
            return value
        return value[index.to(value.device)]
    if isinstance(value, Mapping):
        return {k: take_rows(v, rows, index, k) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(take_rows(v, rows, index, name) for v in value)
    return value


@dataclass(frozen=True)
class Conditioning:
    """Denoiser arguments for one prompt: rows [negative, positive]."""

    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseModel:
    """The base pipeline's denoiser and VAE, bound to one image of the running batch."""

    pipe: Any
    vae: Any
    family: Family
    scheduler: Any
    calls: Sequence[DenoiserCall]
    image: int
    batch: int
    guidance: float
    true_cfg: float = 1.0
    conditioning: Conditioning | None = None
    null_embedding: Tensor | None = None

    @property
    def prediction(self) -> str:
        return schedule.prediction_type(self.scheduler)

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    @property
    def has_cfg(self) -> bool:
        """The running generation has an unconditional branch in its batch."""
        return self.calls[0].sample.shape[0] == 2 * self.batch

    def level(self, noise: float) -> Level:
        return schedule.level_at(self.scheduler, noise)

    def decode(self, z: Float[Tensor, "c h w"]) -> Float[Tensor, "3 H W"]:
        return vae_decode(self.vae, z[None], self.device)[0]

    def encode(self, image: Float[Tensor, "3 H W"], latent_size: tuple[int, int]) -> Float[Tensor, "c h w"]:
        """Resize to the base's pixel size and encode with the base VAE."""
        factor = self.pipe.vae_scale_factor
        pixels = resize(image[None], (latent_size[0] * factor, latent_size[1] * factor))
        return vae_encode(self.vae, pixels, self.device)[0]

    def told(self, prompt: str, negative: str) -> BaseModel:
        """The same base, told something else than the user's prompt."""
        kwargs = self.family.encode_prompt(self, prompt, negative)
        return replace(self, conditioning=Conditioning(kwargs))

    def estimate(
        self, z: Float[Tensor, "n c h w"], level: Level, guidance: float | Tensor | None = None
    ) -> tuple[Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
        """Clean estimate and noise of n latents at one level, under the base's own guidance or another."""
        scale = (level.signal**2 + level.sigma**2) ** 0.5 if self.prediction != "flow" else 1.0
        output = self.family.predict(self, z / scale, level, self.guidance if guidance is None else guidance)
        normal = Level(level.signal / scale, level.sigma / scale, level.noise)
        return schedule.split(output.float(), z / scale, normal, self.prediction)

    def rows(self, call: DenoiserCall, n: int, branches: tuple[int, ...]) -> dict[str, Any]:
        """Keyword arguments of a recorded call, cut to this image: n rows per branch (0 negative, 1 positive).

        A call recorded without guidance has one branch, which then stands for both.
        """
        total = call.sample.shape[0]
        last = total // self.batch - 1
        index = torch.tensor([min(b, last) * self.batch + self.image for b in branches for _ in range(n)])
        kwargs = {k: take_rows(v, total, index, k) for k, v in call.kwargs.items()}
        if self.conditioning is not None:
            told = torch.tensor([b for b in branches for _ in range(n)])
            for name, value in self.conditioning.kwargs.items():
                chosen = take_rows(value, 2, told, name)
                kwargs[name] = {**kwargs[name], **chosen} if isinstance(chosen, dict) else chosen
        elif self.null_embedding is not None:
            states = kwargs["encoder_hidden_states"]
            null = self.null_embedding.to(states).expand(n, *states.shape[1:])
            kwargs["encoder_hidden_states"] = torch.cat([null, states[n:]])
        return kwargs

    def branches(self, call: DenoiserCall) -> tuple[int, ...]:
        """Both where there is guidance (or other words are told), else the only one."""
        return (0, 1) if self.conditioning is not None or call.sample.shape[0] == 2 * self.batch else (0,)


def guided(outputs: Float[Tensor, "m ..."], guidance: float | Tensor, ndim: int) -> Float[Tensor, "n ..."]:
    """Classifier-free guidance over rows [negative, positive]; guidance may differ per row."""
    negative, positive = outputs.chunk(2)
    if isinstance(guidance, Tensor):
        guidance = guidance.to(outputs).view(-1, *[1] * (ndim - 1))
    return negative + guidance * (positive - negative)
