"""Between pixels and latents: the base's own VAE, and tiny decoders for cheap views."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def resize(images: Float[Tensor, "b c h w"], size: tuple[int, int]) -> Float[Tensor, "b c h2 w2"]:
    """Bilinear with anti-aliasing; the identity when the size is already right."""
    if tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)


def audit_size(height: int, width: int, pixels: int) -> tuple[int, int]:
    """Shorter side = pixels, aspect kept up to 4 : 1."""
    scale = pixels / min(height, width)
    return min(4 * pixels, max(pixels, round(height * scale))), min(4 * pixels, max(pixels, round(width * scale)))


_UPCASTING = threading.RLock()


@contextmanager
def _fp32_if_it_overflows(vae: Any) -> Iterator[None]:
    """Run an fp16 VAE that asks for it in fp32, as the pipelines do; one thread at a time, for the cast is in place."""
    if not (vae.dtype == torch.float16 and vae.config.get("force_upcast", False)):
        yield
        return
    with _UPCASTING:
        vae.to(dtype=torch.float32)
        try:
            yield
        finally:
            vae.to(dtype=torch.float16)


def _affine(vae: Any, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """(scale, shift) with raw = scaled · scale + shift."""
    mean, std = vae.config.get("latents_mean"), vae.config.get("latents_std")
    factor = vae.config.scaling_factor
    if mean is not None and std is not None:
        shape = (1, -1, 1, 1)
        return (
            torch.tensor(std, device=like.device).view(shape) / factor,
            torch.tensor(mean, device=like.device).view(shape),
        )
    return 1.0 / factor, vae.config.get("shift_factor") or 0.0


def vae_decode(vae: Any, latents: Float[Tensor, "b c h w"], device: torch.device) -> Float[Tensor, "b 3 H W"]:
    """Full decode to [0, 1], fp32 out."""
    scale, shift = _affine(vae, latents)
    raw = latents * scale + shift
    with _fp32_if_it_overflows(vae):
        images = vae.decode(raw.to(device, vae.dtype), return_dict=False)[0]
    return (images.float() / 2 + 0.5).clamp(0, 1)


def vae_encode(vae: Any, images: Float[Tensor, "b 3 H W"], device: torch.device) -> Float[Tensor, "b c h w"]:
    """Encode [0, 1] images to the mode of the posterior; draws nothing."""
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img import retrieve_latents

    with _fp32_if_it_overflows(vae):
        out = vae.encode((images * 2 - 1).to(device, vae.dtype))
        raw = retrieve_latents(out, sample_mode="argmax").float()
    scale, shift = _affine(vae, raw)
    return (raw - shift) / scale


class ViewDecoder:
    """Decodes latents to audit views: a tiny decoder where there is one, else the base's VAE."""

    def __init__(self, tiny: Any | None, vae: Any, factor: int, device: torch.device, only_tiny: bool = False) -> None:
        self.tiny, self.vae, self.factor, self.device = tiny, vae, factor, device
        self.only_tiny = only_tiny
        """Whether even what is to be repaired is decoded by the tiny one."""

    @property
    def name(self) -> str:
        return "tiny" if self.tiny is not None else "full"

    @property
    def repair_name(self) -> str:
        return "tiny" if self.tiny is not None and self.only_tiny else "full"

    def to_repair(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 3 H W"]:
        """The view a repair is painted into: decoded by the VAE that will encode it again."""
        return self.full(latents) if self.repair_name == "tiny" else vae_decode(self.vae, latents, self.device)

    def full(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 3 H W"]:
        """A view at the base's pixel size."""
        if self.tiny is None:
            return vae_decode(self.vae, latents, self.device)
        weight = next(self.tiny.parameters())
        latents = latents.to(weight).contiguous(memory_format=torch.channels_last)
        images = self.tiny.decode(latents, return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1)

    def at(self, latents: Float[Tensor, "b c h w"], pixels: int) -> Float[Tensor, "b 3 H W"]:
        """A view whose shorter side is `pixels`; latents shrink first when the decoder is tiny."""
        h, w = latents.shape[-2] * self.factor, latents.shape[-1] * self.factor
        size = audit_size(h, w, pixels)
        if self.tiny is not None and min(h, w) > pixels:
            small = (max(1, round(size[0] / self.factor)), max(1, round(size[1] / self.factor)))
            latents = F.interpolate(latents, size=small, mode="area")
        return resize(self.full(latents), size)
