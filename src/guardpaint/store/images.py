"""Reading and writing image files: every bad file has its own clear error. Pictures from strangers go through
`store/uploads.py`, which uses what is here."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor

from guardpaint.errors import BadInput, TooLarge
from guardpaint.store.checkpoint import write_atomic
from guardpaint.store.containers import checked, orientation

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats that are read. Pillow tries no other, so that no file reaches Ghostscript or a rarely used parser."""
MOST_PIXELS = 64_000_000
MOST_FRAMES = 1024
DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
"""Modes of grey pictures with more than 8 bits per pixel."""
ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → what turns the picture upright."""


def read_bytes(path: str | Path) -> bytes:
    """The bytes of an image file; raises BadInput if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such image") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error


def load_image(path: str | Path) -> Image.Image:
    """Decode the first frame, turn upright, keep the mode; truncated or foreign files raise BadInput."""
    return load_bytes(read_bytes(path), str(path))


def load_bytes(data: bytes, name: str) -> Image.Image:
    """Decode the first frame from bytes, as `load_image` does; `name` is used in error messages."""
    with opened(data, name, MOST_FRAMES, MOST_PIXELS) as image:
        if image.width * image.height > MOST_PIXELS:
            raise TooLarge(f"{name}: {image.width}×{image.height} is over {MOST_PIXELS // 1_000_000} MP; scale it down")
        image.load()
        return upright(image, image)


@contextmanager
def opened(data: bytes, name: str, most_frames: int, largest_pixels: int) -> Iterator[ImageFile.ImageFile]:
    """The file's image, not decoded yet. Whatever goes wrong, here or inside of the with block, is BadInput."""
    try:
        data = checked(data, name, most_frames, largest_pixels)
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image
    except BadInput:
        raise
    except UnidentifiedImageError as error:
        raise BadInput(f"{name}: not an image in a format that is read ({', '.join(FORMATS)})") from error
    except Exception as error:  # Pillow's parsers raise almost anything for damaged files
        raise BadInput(f"{name}: damaged or truncated image ({type(error).__name__}: {error})") from error


def turned(image: Image.Image) -> int:
    """The EXIF orientation of a decoded picture that is still to be undone. Pillow does it for TIFF when it decodes."""
    return 1 if image.format == "TIFF" else orientation(image.info.get("exif", b""))


def upright(image: Image.Image, source: Image.Image) -> Image.Image:
    """The picture turned as the EXIF block of its source says."""
    method = UPRIGHT.get(turned(source))
    return image if method is None else image.transpose(method)


def colours(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """The picture in RGB, whatever lies over its colours, and its alpha channel if it has one."""
    if image.mode in DEEP:
        clear = image.info.get("transparency")
        alpha = None if clear is None else Image.fromarray((np.asarray(image) != clear).astype(np.uint8) * 255)
        return next(depths(image))[1].convert("RGB"), alpha
    if image.mode in ALPHA or "transparency" in image.info:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        return rgba.convert("RGB"), rgba.getchannel("A")
    return image.convert("RGB"), None


def depths(image: Image.Image) -> Iterator[tuple[str, Image.Image]]:
    """Every way in which programs show a grey picture of more than 8 bits, the usual one first, in 8 bits."""
    values = np.asarray(image)
    if image.mode == "F":
        if not np.isfinite(values).all():
            raise BadInput("the pixels hold NaN or infinity")
        yield "from 0 to 1", Image.fromarray((values.clip(0, 1) * np.float32(255)).round().astype(np.uint8))
    else:
        yield "upper 8 of 16 bits", Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8))
    yield "cut off at 255", Image.fromarray(values.clip(0, 255).astype(np.uint8))
    low, high = np.float32(values.min()), np.float32(values.max())
    if high > low:
        stretched = (values.astype(np.float32) - low) * (np.float32(255) / (high - low))
        yield "stretched", Image.fromarray(stretched.round().clip(0, 255).astype(np.uint8))


def over(colour: Image.Image, alpha: Image.Image | None, background: str = "white") -> Image.Image:
    """An RGB picture laid over a background."""
    if alpha is None:
        return colour
    canvas = Image.new("RGB", colour.size, background)
    canvas.paste(colour, (0, 0), alpha)
    return canvas


def as_rgb(image: Image.Image) -> Image.Image:
    """Any PIL image in RGB: transparency is laid over white, deep greys are brought to 8 bits."""
    return over(*colours(image))


def png_bytes(image: Image.Image) -> bytes:
    """Return the picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: Image.Image, most: int | None = None) -> str:
    """Return the picture as a PNG data URL, scaled down so that neither side is over `most` pixels."""
    if most is not None:
        image = image.copy()
        image.thumbnail((most, most))
    return "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode()


def save_image(image: Image.Image, path: str | Path) -> None:
    """Write a PNG file, whole or not at all."""
    write_atomic(Path(path), png_bytes(image))


def as_pixels(images: Sequence[UInt8[np.ndarray, "h w 3"]]) -> Float[Tensor, "b 3 h w"]:
    """Pictures of one size as pixels in [0, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255


def to_pil(image: Float[Tensor, "3 h w"]) -> Image.Image:
    """RGB in [0, 1] as a PIL image."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array)


def from_pil(image: Image.Image) -> Float[Tensor, "3 h w"]:
    """Any PIL image as RGB in [0, 1]; transparency is laid over white."""
    return torch.from_numpy(np.array(as_rgb(image))).permute(2, 0, 1).float().div_(255)
