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

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the picture in pixels."""
        ...

    def at(self, pixels: int) -> Float[Tensor, "3 h w"]: ...

    def path(self, pixels: int) -> str:
        """What decodes `at(pixels)`."""
        ...

    def full(self) -> Float[Tensor, "3 h w"]: ...

    def native(self) -> Float[Tensor, "3 h w"]:
        """The picture at its own size, as the decoder of `at` shows it; tiles are cut from it."""
        ...


class LatentView:
    """A view of an unfinished image, decoded from its clean estimate or stepped latent."""

    exact = False

    def __init__(self, decoder: ViewDecoder, latent: Float[Tensor, "c h w"], kind: str, noise: float) -> None:
        self._decoder, self.latent, self.kind, self.noise = decoder, latent, kind, noise
        self.decoder, self.repair_decoder = decoder.name, decoder.repair_name

    def at(self, pixels: int) -> Float[Tensor, "3 h w"]:
        return self._decoder.at(self.latent[None], pixels)[0].cpu()

    def path(self, pixels: int) -> str:
        return self._decoder.path(self.size, pixels)

    def full(self) -> Float[Tensor, "3 h w"]:
        return self._decoder.to_repair(self.latent[None])[0].cpu()

    def native(self) -> Float[Tensor, "3 h w"]:
        return self._decoder.full(self.latent[None])[0].cpu()

    @property
    def size(self) -> tuple[int, int]:
        return self._decoder.factor * self.latent.shape[-2], self._decoder.factor * self.latent.shape[-1]


class PixelView:
    """A view of a finished image: the decode the user gets anyway."""

    kind = "final"
    exact = True
    noise = 0.0

    def __init__(self, image: Float[Tensor, "3 h w"], decoder: str = "output") -> None:
        self._image, self.decoder, self.repair_decoder = image, decoder, decoder

    def at(self, pixels: int) -> Float[Tensor, "3 h w"]:
        return shrink(self._image, pixels)

    def path(self, pixels: int) -> str:
        return self.decoder

    def full(self) -> Float[Tensor, "3 h w"]:
        return self._image

    def native(self) -> Float[Tensor, "3 h w"]:
        return self._image

    @property
    def size(self) -> tuple[int, int]:
        return int(self._image.shape[-2]), int(self._image.shape[-1])
