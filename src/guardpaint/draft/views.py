"""A view: what the auditor sees of one image, at the size it asks for."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.codec import ViewDecoder, audit_size, resize


def shrink(image: Float[Tensor, "3 h w"], pixels: int) -> Float[Tensor, "3 u v"]:
    """An image at audit size."""
    return resize(image[None], audit_size(int(image.shape[-2]), int(image.shape[-1]), pixels))[0]


@runtime_checkable
class View(Protocol):
    """One image, decodable at any size; `exact` when `at(p)` is `full()` shrunk to p."""

    kind: str
    decoder: str
    repair_decoder: str
    """What decodes `full()`."""
    noise: float
    exact: bool

    def at(self, pixels: int) -> Float[Tensor, "3 h w"]: ...

    def full(self) -> Float[Tensor, "3 h w"]: ...


class LatentView:
    """A view of an unfinished image, decoded from its clean estimate or stepped latent."""

    exact = False

    def __init__(self, decoder: ViewDecoder, latent: Float[Tensor, "c h w"], kind: str, noise: float) -> None:
        self._decoder, self.latent, self.kind, self.noise = decoder, latent, kind, noise
        self.decoder, self.repair_decoder = decoder.name, decoder.repair_name

    def at(self, pixels: int) -> Float[Tensor, "3 h w"]:
        return self._decoder.at(self.latent[None], pixels)[0].cpu()

    def full(self) -> Float[Tensor, "3 h w"]:
        return self._decoder.to_repair(self.latent[None])[0].cpu()


class PixelView:
    """A view of a finished image: the decode the user gets anyway."""

    kind = "final"
    exact = True
    noise = 0.0

    def __init__(self, image: Float[Tensor, "3 h w"], decoder: str = "output") -> None:
        self._image, self.decoder, self.repair_decoder = image, decoder, decoder

    def at(self, pixels: int) -> Float[Tensor, "3 h w"]:
        return shrink(self._image, pixels)

    def full(self) -> Float[Tensor, "3 h w"]:
        return self._image
