"""Picture files as strangers send them: valid ones of every kind, damaged ones, and kinds that are refused.

`damaged_file(random)` makes one hostile upload from a `random.Random`; a longer fuzz can call it as often as it likes.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from random import Random

import numpy as np
from PIL import Image

REFUSED = ("AVIF", "DDS", "EPS", "ICO", "IM", "JPEG2000", "PCX", "PPM", "SGI", "SPIDER", "TGA")
"""Formats that Pillow can write and the guard does not read."""
MAGIC = (
    b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\x40\0\0\0WEBPVP8 ", b"RIFF\x40\0\0\0WEBPVP8X", b"GIF89a", b"BM", b"II*\0",
    b"MM\0*", b"II+\0", b"MM\0+", b"DDS ", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"8BPS\0\1", b"\0\0\1\0", b"P6\n", b"\x0a\5\1\x08",
    b"Image type: RGB\r\n", b"\0\0\0\x0cjP  \r\n\x87\n", b"\0\0\0\x1cftypavif", b"icns", b"\xd7\xcd\xc6\x9a", b"SIMPLE  =",
    b"\x1a\x45\xdf\xa3", b"%PDF-1.4\n", b"qoif", b"BLP2", b"FTEX", b"\x01\xda\x01\1", b"#define a_width 9\n", b"/* XPM */",
)  # fmt: skip
"""First bytes of accepted and of refused formats."""


def saved(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (23, 17), seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    if mode in ("RGBA", "LA", "PA"):
        return Image.fromarray(pixels).convert(mode)
    return Image.fromarray(pixels[..., :3]).convert(mode)


def grey(values, kind) -> Image.Image:
    return Image.fromarray(np.asarray(values, dtype=kind))


@functools.cache
def valid_files() -> dict[str, bytes]:
    """Small pictures in every accepted format, in all modes that matter, still and moving."""
    frames = [noise(seed=s) for s in (1, 2, 3)]
    moving = {"save_all": True, "append_images": frames[1:], "duration": 40}
    deep = np.random.default_rng(4).integers(0, 65536, (9, 11))
    exif = Image.Exif()
    exif[274] = 6
    files = {f"png-{m}": saved(noise(m), "PNG") for m in ("1", "L", "LA", "P", "RGB", "RGBA")}
    files |= {f"jpeg-{m}": saved(noise(m), "JPEG") for m in ("L", "RGB", "CMYK")}
    files |= {
        f"tiff-{m}": saved(noise(m), "TIFF") for m in ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB")
    }
    files |= {
        f"tiff-{c}": saved(noise(), "TIFF", compression=c) for c in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")
    }
    files |= {f"webp-{m}": saved(noise(m), "WEBP") for m in ("RGB", "RGBA")}
    files |= {f"bmp-{m}": saved(noise(m), "BMP") for m in ("1", "L", "P", "RGB", "RGBA")}
    files |= {
        "png-16": saved(grey(deep, np.uint16), "PNG"), "png-16-rgb": png16(np.stack([deep] * 3, -1)),
        "tiff-16": saved(grey(deep, np.uint16), "TIFF"), "tiff-32": saved(grey(deep, np.int32), "TIFF"),
        "tiff-float": saved(grey(deep / 65535, np.float32), "TIFF"),
        "png-key": saved(noise("P"), "PNG", transparency=3), "png-keys": saved(noise("P"), "PNG", transparency=bytes(range(200))),
        "gif": saved(noise("P"), "GIF"), "gif-clear": saved(noise("P"), "GIF", transparency=3),
        "gif-moving": saved(frames[0], "GIF", **moving), "webp-moving": saved(frames[0], "WEBP", **moving),
        "png-moving": saved(frames[0], "PNG", **moving), "tiff-pages": saved(frames[0], "TIFF", **moving),
        "mpo": saved(frames[0], "MPO", save_all=True, append_images=frames[1:]),
        "png-default": saved(frames[0], "PNG", save_all=True, append_images=frames[1:], default_image=True),
        "jpeg-progressive": saved(noise(), "JPEG", progressive=True), "jpeg-turned": saved(noise(), "JPEG", exif=exif),
        "webp-lossless": saved(noise(), "WEBP", lossless=True), "png-turned": saved(noise(), "PNG", exif=exif),
        "tiff-big": saved(noise(), "TIFF", big_tiff=True), "tiff-turned": saved(noise(), "TIFF", exif=exif),
    }  # fmt: skip
    return files


@functools.cache
def refused_files() -> dict[str, bytes]:
    """Valid pictures in formats that are not on the list."""
    return {form: saved(noise("F" if form == "SPIDER" else "RGB"), form) for form in REFUSED}


def png16(pixels: np.ndarray) -> bytes:
    """An RGB PNG of 16 bits per channel, which Pillow cannot write."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def tiff_with_tags(entries: list[tuple[int, int, int, int]]) -> bytes:
    """A TIFF of one directory, with an 8 × 8 picture and further (tag, type, count, value) entries."""
    picture = [(256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
               (277, 3, 1, 1), (278, 3, 1, 8), (279, 4, 1, 64)]  # fmt: skip
    every = sorted(picture + entries)
    directory = struct.pack("<H", len(every)) + b"".join(struct.pack("<HHII", *e) for e in every) + bytes(4)
    return b"II*\0" + struct.pack("<I", 72) + bytes(range(64)) + directory


def damaged_file(random: Random) -> bytes:
    """A valid file with some bytes changed, cut, repeated or joined with another's, or noise after a format's first bytes."""
    files = [*valid_files().values(), *refused_files().values()]
    if random.random() < 0.15:
        return random.choice(MAGIC) + random.randbytes(random.randrange(200))
    data = bytearray(random.choice(files))
    for _ in range(random.randrange(4)):
        start = random.randrange(max(1, len(data)))
        size = random.choice((1, 2, 4, 8, 64))
        kind = random.randrange(6)
        if kind == 0:
            data[start : start + size] = random.randbytes(size)
        elif kind == 1:  # numbers that parsers stumble over
            edge = random.choice((0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
            data[start : start + 4] = struct.pack(random.choice("<>") + "I", edge)
        elif kind == 2:
            del data[start:]
        elif kind == 3:
            del data[start : start + size]
        elif kind == 4:
            data[start:start] = data[start : start + size]
        else:
            other = random.choice(files)
            data[start:] = other[min(start, len(other)) :]
    return bytes(data)
