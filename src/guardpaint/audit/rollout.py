"""Attention rollout with gradients: how much each patch of a vision transformer speaks for a category.

Per layer the attention is weighted by the gradient of the category's log-odds, A' = mean over heads of (∂y/∂A ⊙ A)₊,
and relevance is carried through the layers, R ← R + A' R, beginning with R = 1. The row of the class token is the map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

TINY = 1e-12


def attentions(model: Any, pixels: Float[Tensor, "b 3 h w"]) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The logits and every layer's attention; None if the model does not show attention over all of its tokens."""
    out = model(pixels, output_attentions=True)
    layers = getattr(out, "attentions", None)
    if not layers or any(a is None or a.dim() != 4 or a.shape[0] != len(pixels) for a in layers):
        return None
    if len({a.shape[-2:] for a in layers}) != 1 or layers[0].shape[-1] != layers[0].shape[-2]:
        return None
    return out.logits, tuple(layers)


def patch_grid(model: Any, size: tuple[int, int], tokens: int) -> tuple[int, int] | None:
    """Rows and columns of patches, if the tokens are those patches and a few special ones before them."""
    patch = getattr(model.config, "patch_size", None)
    if not isinstance(patch, int) or patch < 1:
        return None
    rows, columns = size[0] // patch, size[1] // patch
    return (rows, columns) if rows >= 2 and columns >= 2 and 0 <= tokens - rows * columns <= 8 else None


@torch.no_grad()
def shows_attention(model: Any, size: tuple[int, int]) -> bool:
    """Whether a model's attention can be rolled out; switches it to the implementation that hands attention out."""
    try:
        model.set_attn_implementation("eager")
        seen = attentions(model, torch.zeros(1, 3, *size, device=model.device))
    except (TypeError, ValueError, AttributeError):  # a model without attention takes no such argument
        return False
    return seen is not None and patch_grid(model, size, seen[1][0].shape[-1]) is not None


def rolled_out(
    model: Any, pixels: Float[Tensor, "b 3 h w"], log_odds: Callable[[Tensor], Float[Tensor, "b c"]]
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b c u v"]]:
    """A model's logits, and the relevance of every patch for each category, which is not negative."""
    with torch.inference_mode(False), torch.enable_grad():
        pixels = pixels.clone().requires_grad_(True)
        seen = attentions(model, pixels)
        if seen is None:
            raise ValueError("the model no longer hands out its attention")
        logits, layers = seen
        odds = log_odds(logits)
        gradients = [
            torch.autograd.grad(odds[:, c].sum(), layers, retain_graph=c + 1 < odds.shape[1])
            for c in range(odds.shape[1])
        ]
    grid = patch_grid(model, (int(pixels.shape[-2]), int(pixels.shape[-1])), layers[0].shape[-1])
    if grid is None:
        raise ValueError("the model's tokens are no grid of patches")
    maps = [relevance([a.detach() for a in layers], g, grid) for g in gradients]
    return logits.detach(), torch.stack(maps, dim=1)


def relevance(layers: list[Tensor], gradients: tuple[Tensor, ...], grid: tuple[int, int]) -> Float[Tensor, "b u v"]:
    """R of the class token over the patches; without a class token, the mean over all tokens."""
    tokens = layers[0].shape[-1]
    carried = torch.eye(tokens, device=layers[0].device).expand(len(layers[0]), tokens, tokens)
    for attention, gradient in zip(layers, gradients, strict=True):
        carried = carried + (gradient * attention).clamp_min(0).mean(1) @ carried
    special = tokens - grid[0] * grid[1]
    row = carried[:, 0] if special else carried.mean(1) - 1 / tokens
    return row[:, special:].clamp_min(0).unflatten(1, grid)


def peaked(maps: Float[Tensor, "*b u v"], peaks: Float[Tensor, "*b"]) -> Float[Tensor, "*b u v"]:
    """Maps that only say where, scaled so that each peaks at the picture's own probability."""
    return maps / maps.amax((-2, -1), keepdim=True).clamp_min(TINY) * peaks[..., None, None]
