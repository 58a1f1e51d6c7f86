"""What repairers encode once for an image, and how they keep an autoencoder's activations small."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.repair.denoise import in_batches


def recalled(memo: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What the memo has under a key, made now if it has nothing."""
    if key not in memo:
        memo[key] = make()
    return memo[key]


def digest_of(tensor: Tensor) -> str:
    """A name for the content of a picture or mask."""
    content = hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
    return content + str(tuple(tensor.shape))


PIECE = 512 * 512
"""Pixels that a VAE encodes or decodes at a time: at that size a batch is no faster than one after the other, and its
activations are what a tournament's memory goes to."""


def in_pieces(work: Callable[[Tensor], Tensor], batch: Float[Tensor, "n c h w"], pixels: int = 1) -> Tensor:
    """The work done on few rows at a time; a row has `pixels` pixels for each of its cells."""
    count = max(1, PIECE // (int(batch.shape[-2]) * int(batch.shape[-1]) * pixels))
    return torch.cat([work(batch[part]) for part in in_batches(len(batch), count)])
