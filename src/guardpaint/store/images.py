"""Reading and writing image files: every bad file has its own clear error."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import write_atomic

MOST_PIXELS = 64_000_000


def load_image(path: str | Path) -> Image.Image:
    """Decode completely, turn upright, keep the mode; truncated or foreign files raise BadInput."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such image") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    return load_bytes(data, str(path))


def load_bytes(data: bytes, name: str) -> Image.Image:
    """Decode an image from bytes, as `load_image` does; `name` is used in error messages."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise BadInput(
                        f"{name}: {image.width}×{image.height} is over {MOST_PIXELS // 1_000_000} MP; scale it down"
                    )
                image.load()
                return ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        raise BadInput(f"{name}: not an image file PIL can read") from error
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{name}: damaged or truncated image ({error})") from error


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
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    array = np.asarray(image.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(array.copy()).permute(2, 0, 1) / 255
