"""Batches of the inpainter's alignment, and what is known of them over all parts and processes of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class AlignmentBatch:
    """Samples of (z0, m, z̃0, prompt, y) with their timesteps and noise."""

    z0: Float[Tensor, "b c h w"]
    """Clean latents."""
    mask: Float[Tensor, "b 1 h w"]
    """1 in the area to paint."""
    masked: Float[Tensor, "b c h w"]
    """z̃0: latents of the pictures with the masked area greyed out."""
    ids: Int[Tensor, "b l"]
    """Prompts as token ids."""
    category: Int[Tensor, " b"]
    """Index into the policy's categories; 0 is safe."""
    t: Int[Tensor, " b"]
    eps: Float[Tensor, "b c h w"]
    """Noise of the first pass."""
    again: Float[Tensor, "b c h w"]
    """Noise of the second pass."""

    @property
    def desired(self) -> Bool[Tensor, " b"]:
        """True for safe samples."""
        return self.category == 0

    def rows(self, index: Bool[Tensor, " b"]) -> AlignmentBatch:
        """The samples that `index` selects."""
        return AlignmentBatch(**{k: v[index] for k, v in vars(self).items()})

    def parts(self, count: int) -> list[AlignmentBatch]:
        """The batch in `count` parts; the k-th has every `count`-th sample from the k-th on."""
        return [AlignmentBatch(**{k: v[first::count] for k, v in vars(self).items()}) for first in range(count)]

    def __len__(self) -> int:
        return len(self.z0)


@dataclass(frozen=True)
class Pass:
    """A batch at the noise levels of one forward pass."""

    batch: AlignmentBatch
    z: Float[Tensor, "b c h w"]
    """Noisy latents."""
    t: Int[Tensor, " b"]
    eps: Float[Tensor, "b c h w"]
    """The noise in `z`."""


@dataclass(frozen=True)
class Comparison:
    """Policy and reference on the samples of one pass."""

    policy: Float[Tensor, "b c h w"]
    """The policy's noise prediction."""
    signal: Float[Tensor, " b"]
    """BCO's gain ℓ_ref − ℓ_θ, or KTO's gap ℓ_θ − ℓ_ref."""
    gap: Float[Tensor, " b"]
    """Identity gap: mean square difference of both clean estimates."""


def over_processes(sums: Tensor) -> Tensor:
    """The sum of a tensor over all processes of a distributed run."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    return sums


def fraction(values: Float[Tensor, " b"], pick: Bool[Tensor, " b"], total: int) -> Float[Tensor, ""]:
    """What the picked samples of a part contribute to a mean over `total` samples of the batch; NaN if total is 0."""
    return values.detach()[pick].sum() / (total or float("nan"))
