"""Recorded denoiser calls and their conditioning: every argument except the latents and the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

SHARED_ROWS = ("img_ids", "txt_ids")
"""Arguments whose first axis is a sequence, not the batch."""

NOT_CONDITIONING = ("sample", "hidden_states", "timestep", "return_dict")
"""Arguments that every replay of a call sets anew."""


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

    @property
    def rows(self) -> int:
        """How many prompts the call answers, the empty or negative ones included."""
        return len(self.kwargs["encoder_hidden_states"])

    def extra_channels(self, latent_channels: int) -> Float[Tensor, "n e h w"] | None:
        """What an inpainting pipeline appended to the latents: the mask and the masked latents."""
        if not self.args and not {"sample", "hidden_states"} & self.kwargs.keys():
            return None
        sample = self.sample
        return sample[:, latent_channels:] if sample.dim() == 4 and sample.shape[1] > latent_channels else None

    def take(self, index: Tensor) -> DenoiserCall:
        """The same call with the rows at `index`, which may repeat."""
        args = tuple(take_rows(a, self.rows, index) for a in self.args)
        return DenoiserCall(self.module, args, take_rows(self.kwargs, self.rows, index))

    def outside_inference(self) -> DenoiserCall:
        """The same call with copies of the tensors that were made under `torch.inference_mode`."""
        return DenoiserCall(self.module, ordinary(self.args), ordinary(self.kwargs))

    def conditioning(self) -> dict[str, Any]:
        """Its arguments without latents and time."""
        return {k: v for k, v in self.kwargs.items() if k not in NOT_CONDITIONING}


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


def ordinary(value: Any) -> Any:
    """A nested argument whose tensors autograd accepts; call it outside of inference mode."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, Mapping):
        return {k: ordinary(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(ordinary(v) for v in value)
    return value


def with_text(arguments: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Denoiser arguments with another text in place of their own; nested arguments keep what the text leaves out."""
    nested = {k: {**(arguments.get(k) or {}), **v} for k, v in text.items() if isinstance(v, Mapping)}
    return {**arguments, **text, **nested}


def guided(outputs: Float[Tensor, "m ..."], guidance: float | Tensor) -> Float[Tensor, "n ..."]:
    """Classifier-free guidance over rows [negative, positive]; guidance may differ per row."""
    negative, positive = outputs.chunk(2)
    if isinstance(guidance, Tensor):
        guidance = guidance.to(outputs).view(-1, *[1] * (outputs.dim() - 1))
    return negative + guidance * (positive - negative)
