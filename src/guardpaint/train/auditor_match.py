"""Cosines of every image with every prompt, for InfoNCE: over a batch, and over the batches of all processes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from guardpaint.audit.model import AuditorScorer, Text

LARGEST = 1 << 25
"""Most attention weights that are held at once; beyond that, images are taken in groups and computed again in the
backward pass. 2²⁵ are 128 MB."""


def pairwise_cosines(model: AuditorScorer, visual: Float[Tensor, "b c u v"], text: Text) -> Float[Tensor, "b t"]:
    """cos(image i read with prompt j, prompt j) for all pairs, exactly as an audit of that pair would give it.

    The image side attends to the prompt's words, so an image embedding computed with the image's own prompt would
    contain that prompt, and the pairs could be told apart without the image. Queries are projected once per image and
    keys once per prompt; the mean over the cells of a picture is taken before the value and output projections, which
    are linear.
    """
    attention, heads = model.attention, model.attention.num_heads
    queries = model.query_norm(model.query(visual).flatten(2).transpose(1, 2))
    words = model.key_norm(text.sequence)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, w, b in zip(
            (queries, words, words), attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True
        )
    )
    prompts = F.normalize(model.text_proj(text.vector), dim=1)

    def rows(some: Float[Tensor, "m h n e"]) -> Float[Tensor, "m t"]:
        """The cosines of some images with all prompts."""
        scores = torch.einsum("mhne,thle->mthnl", some, k) / math.sqrt(some.shape[-1])
        share = scores.masked_fill(text.padding[None, :, None, None], -torch.inf).softmax(-1).mean(3)
        attended = torch.einsum("mthl,thle->mthe", share, v).flatten(2)
        images = F.normalize(model.image_proj(attention.out_proj(attended)), dim=-1)
        return (images * prompts).sum(-1)

    group = max(1, LARGEST // (q[0].numel() // q.shape[-1] * k.shape[0] * k.shape[2]))
    if group >= len(q):
        return rows(q)
    return torch.cat([checkpoint(rows, some, use_reentrant=False) for some in q.split(group)])


def batch_cosines(model: AuditorScorer, visual: Float[Tensor, "b c u v"], text: Text) -> Float[Tensor, "n n"]:
    """The cosines of the images and prompts of all processes, in the order of the processes.

    Every process computes the rows of its own images. Its gradients are such that their mean over the processes, which
    data-parallel training takes, is the gradient of a loss of the whole matrix.
    """
    if processes() == 1:
        return pairwise_cosines(model, visual, text)
    rows = pairwise_cosines(model, visual, everyones(text))
    cosines: Tensor = OwnRows.apply(rows)  # type: ignore[no-untyped-call]
    return cosines


def processes() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def everyones(text: Text) -> Text:
    """The encoded prompts of all processes, padded to the longest."""
    width = torch.tensor(text.padding.shape[1], device=text.padding.device)
    dist.all_reduce(width, dist.ReduceOp.MAX)
    lacking = int(width) - text.padding.shape[1]
    sequence: Tensor = Shared.apply(F.pad(text.sequence, (0, 0, 0, lacking)))  # type: ignore[no-untyped-call]
    vector: Tensor = Shared.apply(text.vector)  # type: ignore[no-untyped-call]
    padding = gathered(F.pad(text.padding, (0, lacking), value=True).to(torch.uint8)).bool()
    return Text(vector, sequence, padding)


def gathered(tensor: Float[Tensor, "b ..."]) -> Float[Tensor, "n ..."]:
    """The tensors of all processes, one after the other; they must have equal shapes. It carries no gradient."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(processes())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts)


class Shared(torch.autograd.Function):
    """The tensors of all processes, all of which use all of them: a gradient is the sum of what every process finds."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = len(tensor)
        return gathered(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total[dist.get_rank() * ctx.rows :][: ctx.rows]


class OwnRows(torch.autograd.Function):
    """The rows of all processes, all of which compute the same loss of them: each keeps the gradient of its own rows.

    That gradient is multiplied by the number of processes, because the mean over them follows.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = len(tensor)
        return gathered(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0][dist.get_rank() * ctx.rows :][: ctx.rows] * processes()
