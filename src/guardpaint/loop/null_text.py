"""What null-text reinsertion does in the steps that remain after a repair: one unconditional embedding for each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.denoiser import Denoiser
from guardpaint.errors import NotFinite
from guardpaint.reinsert import rules
from guardpaint.types import Edit, Level


@dataclass
class NullText:
    """The repair that one image's remaining steps must reproduce, and the embedding by which the current one does."""

    edit: Edit
    embedding: Float[Tensor, "1 l d"]
    step: int
    """The step that the embedding was optimised for."""
    every_step: bool
    """Whether each step optimises its own (SPEC §6); else the first one is used by all."""

    def optimise(self, step: int, inputs: Float[Tensor, "i h w"], level: Level, base: Denoiser) -> None:
        """Replace the embedding by that of another step, from its live latent; it starts from the one before.

        `inputs` are what the pipeline gives the network: the latent scaled to unit variance, and perhaps more channels.
        """
        z = inputs[: len(self.edit.z0)].float()
        if base.prediction != "flow":
            z = z * math.hypot(level.signal, level.sigma)
        found = rules.null_text(z, self.edit, level, base, self.embedding)
        if not torch.isfinite(found).all():
            raise NotFinite(f"the null-text embedding of step {step} holds NaN or infinity")
        self.embedding, self.step = found, step
