"""Class-activation maps: what each cell of the last feature map says by itself.

A model qualifies if its logits are a linear head on the mean of its feature map, with at most a layer norm between:
ResNet, ConvNeXt, MobileNet, RegNet, Swin, BEiT and others. Two random pictures show whether that is so; the name of
the architecture does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

TOLERANCE = 1e-3
"""How far the logits may differ from those of the model, as a share of the largest one."""


@dataclass(frozen=True)
class MeanPooled:
    """A model's feature map and the linear head that reads the mean of it."""

    base: nn.Module
    linear: nn.Linear
    norm: nn.LayerNorm | None
    special: int
    """Leading tokens that are no part of the picture."""

    def features(self, pixels: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b u v c"]:
        """The last feature map, channels last."""
        return as_cells(self.base(pixels).last_hidden_state, self.special)

    def cells(self, features: Float[Tensor, "b u v c"]) -> Float[Tensor, "b u v k"]:
        """The logits of every cell; their mean is the picture's.

        A layer norm after the mean is linear once its own mean and variance are known, which are those of the picture.
        """
        if self.norm is not None:
            mean = features.mean((1, 2), keepdim=True)
            centre, spread = mean.mean(-1, keepdim=True), mean.var(-1, keepdim=True, correction=0)
            features = (features - centre) / (spread + self.norm.eps).sqrt() * self.norm.weight + self.norm.bias
        return self.linear(features)


def as_cells(state: Tensor, special: int) -> Float[Tensor, "b u v c"]:
    """A feature map of either layout, channels × height × width or tokens × channels, as a square of cells."""
    if state.dim() == 4:
        return state.permute(0, 2, 3, 1)
    tokens = state[:, special:]
    side = round(tokens.shape[1] ** 0.5)
    return tokens.reshape(len(tokens), side, side, -1)


def layouts(state: Tensor) -> list[int]:
    """How many leading tokens may be no part of the picture; the rest is a square of at least 2 × 2."""
    if state.dim() == 4:
        return [0] if min(state.shape[-2:]) >= 2 else []
    counts = range(3) if state.dim() == 3 else ()
    return [
        n for n in counts if state.shape[1] - n >= 4 and round((state.shape[1] - n) ** 0.5) ** 2 == state.shape[1] - n
    ]


@torch.no_grad()
def mean_pooled(model: Any, size: tuple[int, int]) -> MeanPooled | None:
    """The model's feature map and head if they explain its logits, else None."""
    base = model.base_model
    inside = set(base.modules())
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in inside]
    if base is model or not linears or linears[-1].out_features != model.config.num_labels:
        return None
    pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)).to(model.device)
    logits = model(pixels).logits
    state = getattr(base(pixels), "last_hidden_state", None)
    if state is None:
        return None
    linear = linears[-1]
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm) and m.normalized_shape == (linear.in_features,)]
    best, smallest = None, TOLERANCE * float(logits.abs().max())
    for special in layouts(state):
        features = as_cells(state, special)
        for norm in (None, *norms) if features.shape[-1] == linear.in_features else ():
            candidate = MeanPooled(base, linear, norm, special)
            error = float((candidate.cells(features).mean((1, 2)) - logits).abs().max())
            if error <= smallest:
                best, smallest = candidate, error
    return best
