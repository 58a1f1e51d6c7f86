"""Between pixels and latents: the base's own VAE, and tiny decoders for cheap views."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.early_exit import EarlyExits


def resize(images: Float[Tensor, "b c h w"], size: tuple[int, int]) -> Float[Tensor, "b c h2 w2"]:
    """Bilinear with anti-aliasing; the identity when the size is already right."""
    if tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)


def audit_size(height: int, width: int, pixels: int) -> tuple[int, int]:
    """Shorter side = pixels, aspect kept up to 4 : 1."""
    scale = pixels / min(height, width)
    return min(4 * pixels, max(pixels, round(height * scale))), min(4 * pixels, max(pixels, round(width * scale)))


_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def cast_lock(vae: Any) -> threading.RLock:
    """The lock of a VAE whose precision is changed in place around a decode: one thread at a time."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(vae, threading.RLock())


def casts(vae: Any) -> bool:
    """Whether pipelines decode with this VAE in fp32 when it is stored in fp16, because it overflows there."""
    return bool(vae.config.get("force_upcast", False))


@contextmanager
def _fp32_if_it_overflows(vae: Any) -> Iterator[None]:
    """Run an fp16 VAE that asks for it in fp32, as the pipelines do."""
    if not casts(vae):
        yield
        return
    with cast_lock(vae):
        half = vae.dtype == torch.float16
        if half:
            vae.to(dtype=torch.float32)
        try:
            yield
        finally:
            if half:
                vae.to(dtype=torch.float16)


class Casts:
    """What a pipeline may do to the precision of a VAE that overflows in fp16, under the VAE's lock.

    Pipelines ask for `dtype`, cast to fp32 with `to`, decode or encode, and cast back with `to`. From the first cast to
    the second the lock is held; `close` releases it if the pipeline did not come that far.
    """

    def __init__(self, vae: Any) -> None:
        self.vae, self.lock = vae, cast_lock(vae)
        self.held = False
        with self.lock:
            self.half = vae.dtype == torch.float16

    def dtype(self) -> torch.dtype:
        with self.lock:
            dtype: torch.dtype = self.vae.dtype
            return dtype

    def to(self, *args: Any, **kwargs: Any) -> None:
        self.lock.acquire()
        try:
            self.vae.to(*args, **kwargs)
            if self.half and not self.held and self.vae.dtype == torch.float32:
                self.lock.acquire()
                self.held = True
            elif self.held and self.vae.dtype == torch.float16:
                self.release()
        finally:
            self.lock.release()

    def release(self) -> None:
        self.held = False
        self.lock.release()

    def close(self) -> None:
        """Release the lock; a VAE that the pipeline left in fp32 is fp16 again."""
        if self.held:
            self.vae.to(dtype=torch.float16)
            self.release()


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

    def __init__(
        self,
        tiny: Any | None,
        vae: Any,
        factor: int,
        device: torch.device,
        only_tiny: bool = False,
        exits: EarlyExits | None = None,
    ) -> None:
        self.tiny, self.vae, self.factor, self.device = tiny, vae, factor, device
        self.only_tiny = only_tiny
        """Whether even what is to be repaired is decoded by the tiny one."""
        self.exits = EarlyExits(tiny) if exits is None and tiny is not None else exits

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

    def shrink(self, size: tuple[int, int], pixels: int) -> int:
        """How many times smaller than the picture the exit of a view at `pixels` is; 1 is a whole decode."""
        if self.exits is None or self.tiny is None:
            return 1
        return self.exits.shrink(size, audit_size(*size, pixels))

    def path(self, size: tuple[int, int], pixels: int) -> str:
        """What decodes a view of a picture of this size at `pixels`: full (the VAE), tiny, or an exit of the tiny."""
        shrink = self.shrink(size, pixels)
        return self.name if shrink == 1 else f"exit 1/{shrink}"

    def made_by(self, size: tuple[int, int], pixels: int) -> str:
        """The path with the weights that it runs through, for comparison with the views of a calibration."""
        path = self.path(size, pixels)
        if self.exits is None or path == "full":
            return path
        return f"{path} {self.exits.decoder[:12] if path == 'tiny' else self.exits.readouts.identity[:12]}"

    def ways_at(self, size: tuple[int, int], looks: Iterable[int]) -> tuple[str, ...]:
        """How views of pictures of this size are made, for looks at several sizes."""
        return tuple(sorted({self.made_by(size, pixels) for pixels in looks}))

    def ways(self) -> frozenset[str]:
        """Every way in which views of pictures of any size can be made."""
        if self.tiny is None or self.exits is None:
            return frozenset({"full"})
        identity = self.exits.readouts.identity[:12]
        return frozenset({f"tiny {self.exits.decoder[:12]}", *(f"exit 1/{s} {identity}" for s in self.exits.shrinks)})

    def at(self, latents: Float[Tensor, "b c h w"], pixels: int) -> Float[Tensor, "b 3 H W"]:
        """A view whose shorter side is `pixels`, by the cheapest way that shows as much."""
        whole = latents.shape[-2] * self.factor, latents.shape[-1] * self.factor
        shrink = self.shrink(whole, pixels)
        if shrink == 1 or self.exits is None:
            return resize(self.full(latents), audit_size(*whole, pixels))
        return resize(self.exits.picture(latents, shrink), audit_size(*whole, pixels))
