"""Pictures from strangers: bounded before they are decoded, every frame, every way in which a viewer may show it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from PIL import Image, ImageFile, ImageOps
from PIL.TiffImagePlugin import TiffImageFile

from guardpaint.errors import BadConfig, BadInput, TooLarge
from guardpaint.store.containers import GIF, gif
from guardpaint.store.images import DEEP, colours, depths, opened, over, turned, upright

BYTES_PER_PIXEL = 32
"""Memory that one pixel of the largest frame takes at the most while it is decoded and laid over backgrounds. Measured:
16 for WebP inside of its decoder, 4 for other formats, and 12 for colours, alpha and canvas."""
SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""
INVERTED = 0
"""The value of a TIFF's tag PhotometricInterpretation (262) under which 0 is white."""


@dataclass(frozen=True)
class Limits:
    """What is taken of a picture."""

    largest_pixels: int = 4096 * 4096
    """Pixels of all frames together. More are refused before anything is decoded."""
    most_frames: int = 64
    """Frames of an animation or pages of a file. More are refused; none is skipped."""
    longest_side: int = 2048
    """A frame whose longer side has more pixels is shrunk to this before it is audited."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise BadConfig(f"{name}={value}: must be at least 1")


@dataclass(frozen=True)
class Reading:
    """One way to show one frame, ready for an audit."""

    image: Image.Image
    """Upright RGB, no side over the limit."""
    frame: int
    """Counted from 1."""
    name: str
    """What was done to show it, such as `over black`; empty if there is only one way."""
    size: tuple[int, int]
    """Width and height of the upright frame in the file."""


class Upload:
    """A picture file from somebody else. It is checked here; `readings` decodes it."""

    def __init__(self, data: bytes, name: str, limits: Limits) -> None:
        self.data, self.name, self.limits = data, name, limits
        with self.opened() as image:
            sizes = list(self.sizes(image))
        self.frames, self.largest = len(sizes), max(w * h for w, h in sizes)
        self.shapes = tuple(dict.fromkeys(sizes))
        """Width and height of the frames as the headers have it, not turned upright; each once."""
        pixels = sum(w * h for w, h in sizes)
        if not self.largest:
            raise BadInput(f"{name}: {sizes[0][0]}×{sizes[0][1]} is no picture")
        if pixels > limits.largest_pixels:
            frames = f" in {self.frames} frames" if self.frames > 1 else ""
            raise TooLarge(
                f"{name}: {sizes[0][0]}×{sizes[0][1]}{frames} is {pixels / 1e6:.1f} megapixels; "
                f"at most {limits.largest_pixels / 1e6:.1f} are taken, so scale it down"
            )

    @property
    def memory(self) -> int:
        """Bytes that decoding and auditing may take at the same time."""
        return BYTES_PER_PIXEL * self.largest + 4 * len(self.data)

    def opened(self) -> AbstractContextManager[ImageFile.ImageFile]:
        return opened(self.data, self.name, self.limits.most_frames, self.limits.largest_pixels)

    def sizes(self, image: ImageFile.ImageFile) -> Iterator[tuple[int, int]]:
        """The size of every frame, from headers alone."""
        if self.data.startswith(GIF):
            frames, size = gif(self.data, self.name, self.limits.most_frames)
        else:
            frames, size = getattr(image, "n_frames", 1), image.size  # Pillow sets n_frames where there can be several
        if frames > self.limits.most_frames:
            raise TooLarge(
                f"{self.name}: {frames} frames; every frame is audited, and at most {self.limits.most_frames} are taken"
            )
        for frame in range(frames):
            if image.format in ("TIFF", "MPO"):
                image.seek(frame)
                size = image.size
            yield size

    def readings(self) -> Iterator[Reading]:
        """Every frame in every way that differs from those before it. Decodes one frame at a time."""
        seen = set[bytes]()
        with self.opened() as image:
            for frame in range(self.frames):
                size, ways = self.decode(image, frame)
                for name, picture in ways:
                    digest = hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()
                    if digest not in seen:
                        seen.add(digest)
                        yield Reading(picture, frame + 1, name, size)
            if getattr(image, "n_frames", 1) != self.frames:
                raise BadInput(f"{self.name}: damaged image (it has frames that its structure does not show)")

    def decode(self, image: ImageFile.ImageFile, frame: int) -> tuple[tuple[int, int], list[tuple[str, Image.Image]]]:
        """The upright size of a frame and the ways to show it, at the size for the audit."""
        image.seek(frame)
        width, height = image.size
        if width * height > self.largest:
            raise BadInput(f"{self.name}: damaged image (frame {frame + 1} is larger than its header says)")
        if image.format == "JPEG":
            image.draft(None, self.fit(image.size))
        image.load()
        ways = [(name, upright(self.shrunk(picture), image)) for name, picture in ways_to_show(image)]
        return (height, width) if turned(image) in SIDEWAYS else (width, height), ways

    def fit(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size for the audit."""
        scale = min(1.0, self.limits.longest_side / max(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))

    def shrunk(self, picture: Image.Image) -> Image.Image:
        size = self.fit(picture.size)
        return picture if size == picture.size else picture.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)


def ways_to_show(image: Image.Image) -> Iterator[tuple[str, Image.Image]]:
    """The picture in RGB as viewers show it: over white, over black, with its alpha ignored, in every depth."""
    colour, alpha = colours(image)
    pictures = [("", colour)]
    if image.mode in DEEP:
        pictures = [(name, grey.convert("RGB")) for name, grey in depths(image)]
        if isinstance(image, TiffImageFile) and image.tag_v2.get(262) == INVERTED:
            pictures += [(f"{name}, inverted", ImageOps.invert(grey)) for name, grey in pictures]
    for name, picture in pictures:
        if alpha is None or alpha.getextrema() == (255, 255):
            yield name, picture
        else:
            for background in ("white", "black"):
                yield joined(name, f"over {background}"), over(picture, alpha, background)
            yield joined(name, "without alpha"), picture


def joined(*names: str) -> str:
    return ", ".join(n for n in names if n)
