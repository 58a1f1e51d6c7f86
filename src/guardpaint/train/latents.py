"""Helpers of the trainers of latent models: latents of pictures, token ids of texts, autoencoder fingerprints."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.store.images import as_pixels


def pixels_of(images: list[np.ndarray]) -> Float[Tensor, "b 3 h w"]:
    """uint8 pictures as channels-last pixels in [−1, 1]."""
    return (2 * as_pixels(images) - 1).contiguous(memory_format=torch.channels_last)


def encoded(vae: Any, pixels: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b c h w"]:
    """Scaled latents at the posterior's mode, in half precision; on the CPU, wherever the autoencoder is."""
    with torch.no_grad():
        pixels = pixels.to(vae.device).contiguous(memory_format=torch.channels_last)
        raw = vae.encode(pixels).latent_dist.mode().cpu()
    return ((raw - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor).half().contiguous()


def tokenise(tokenizer: Any, texts: list[str]) -> Int[Tensor, "b l"]:
    """Token ids, padded and cut to the tokenizer's length as the pipelines do."""
    return tokenizer(
        texts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids


def fingerprint(vae: Any) -> str:
    """Digest of an autoencoder's scale, shift and encoder weights in half precision, stored with its latents."""
    digest = hashlib.sha256(repr((vae.config.scaling_factor, vae.config.shift_factor)).encode())
    for value in (*vae.encoder.state_dict().values(), *vae.quant_conv.state_dict().values()):
        digest.update(value.half().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
