"""Uploads that show the auditor another picture than a person sees, and files that break decoders.

The staged auditor flags a picture that is plain mid-grey, so whatever reaches it decides.
"""

from __future__ import annotations

import os
import struct
import zlib

import httpx
import numpy as np
from PIL import Image, features

from attempts import Outcome
from attempts.stand import DOUBLE_SERVICE, DOUBLES, GREY, encoded, scratch, served

WHITE = Image.new("RGB", GREY.size, "white")


def flagged(data: bytes, name: str = "upload.png") -> Outcome:
    """The picture holds what the auditor flags: it is flagged, or the file is refused."""
    answer = DOUBLE_SERVICE.get().audit(data, name)
    found = answer.json()["flagged"] if answer.status_code == 200 else None
    got = f"{answer.status_code}, {'refused' if found is None else 'flagged' if found else 'clean'}"
    fits = found is True or answer.status_code in (400, 413, 415)
    return Outcome("flagged, or the file is refused", got, fits)


def refused(data: bytes, name: str) -> Outcome:
    """A file that is none of the taken formats, or damaged."""
    answer = DOUBLE_SERVICE.get().audit(data, name)
    return Outcome("400, 413 or 415", f"{answer.status_code} {message(answer)}", answer.status_code in (400, 413, 415))


def message(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("error", {}).get("message", ""))[:80]
    except ValueError:
        return answer.text[:80]


def a_plain_picture_is_flagged() -> Outcome:
    """The control: without it the others would prove nothing."""
    found = DOUBLE_SERVICE.get().audit(encoded(GREY)).json()["flagged"]
    clean = DOUBLE_SERVICE.get().audit(encoded(WHITE)).json()["flagged"]
    return Outcome("grey flagged, white not", f"{found}, {clean}", found is True and clean is False)


def sixteen_bit_grey() -> Outcome:
    """Read as if it had eight bits, every value is white."""
    level = int(115 / 255 * 65535)
    return flagged(encoded(Image.fromarray(np.full((64, 64), level, np.uint16))))


def sixteen_bit_grey_tiff() -> Outcome:
    level = int(115 / 255 * 65535)
    return flagged(encoded(Image.fromarray(np.full((64, 64), level, np.uint16)), "TIFF"), "a.tiff")


def thirty_two_bit_float() -> Outcome:
    return flagged(encoded(Image.fromarray(np.full((64, 64), 0.45, np.float32)), "TIFF"), "a.tiff")


def frames(form: str) -> bytes:
    """An animation that begins white and then shows what is flagged."""
    timing = {} if form == "TIFF" else {"duration": 100, "loop": 0}
    return encoded(WHITE, form, save_all=True, append_images=[WHITE.copy(), GREY.copy()], **timing)


def a_later_frame_of_a_gif() -> Outcome:
    return flagged(frames("GIF"), "a.gif")


def a_later_frame_of_an_apng() -> Outcome:
    return flagged(frames("PNG"), "a.png")


def a_later_frame_of_a_webp() -> Outcome:
    return flagged(frames("WEBP"), "a.webp")


def a_later_page_of_a_tiff() -> Outcome:
    return flagged(frames("TIFF"), "a.tiff")


def colours_under_a_low_alpha() -> Outcome:
    """Over white the picture is white; a viewer that drops alpha shows the colours."""
    hidden = GREY.copy()
    hidden.putalpha(3)
    return flagged(encoded(hidden))


def colours_under_no_alpha_at_all() -> Outcome:
    hidden = GREY.copy()
    hidden.putalpha(0)
    return flagged(encoded(hidden, "WEBP", lossless=True, exact=True), "a.webp")


def white_that_is_grey_on_black() -> Outcome:
    """White under an alpha of 0.45 is mid-grey on a black page and white on a white one."""
    shade = WHITE.copy()
    shade.putalpha(115)
    return flagged(encoded(shade))


def a_palette_with_a_transparent_colour() -> Outcome:
    paletted = GREY.quantize(2)
    return flagged(encoded(paletted, transparency=paletted.getpixel((0, 0))))


def turned_by_exif() -> Outcome:
    exif = Image.Exif()
    exif[0x0112] = 6
    return flagged(encoded(GREY, "JPEG", exif=exif), "a.jpg")


# Files that break decoders -----------------------------------------------------------------------------------


def a_malformed_dds() -> Outcome:
    header = struct.pack("<7I44s", 124, 0x1007, 64, 64, 0, 0, 1, b"\0" * 44)
    strange = struct.pack("<2I4s5I", 32, 0x4, b"DX10", 0, 0, 0, 0, 0)
    return refused(b"DDS " + header + strange + struct.pack("<5I", 0x1000, 0, 0, 0, 0) + b"\xff" * 40, "a.dds")


def a_malformed_jpeg() -> Outcome:
    data = bytearray(encoded(GREY, "JPEG"))
    where = data.find(b"\xff\xc0")
    data[where + 5 : where + 9] = b"\0\0\0\0"
    return refused(bytes(data), "a.jpg")


def a_malformed_im() -> Outcome:
    return refused(
        b"Image type: L image\r\nImage size (x*y): x*y\r\nFile size (no of images): 1\r\n" + b"\0" * 600, "a.im"
    )


def a_malformed_avif() -> Outcome:
    if features.check("avif"):
        data = bytearray(encoded(GREY, "AVIF"))
        data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
        return refused(bytes(data), "a.avif")
    return refused(b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf\0\0\0\x08meta", "a.avif")


def a_png_with_a_false_size() -> Outcome:
    data = bytearray(encoded(GREY))
    data[16:24] = struct.pack(">2I", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return refused(bytes(data), "a.png")


def postscript_never_reaches_ghostscript() -> Outcome:
    """Pillow runs `gs` for EPS files; a false `gs` on the service's path says whether it was called."""
    with scratch() as folder:
        marker, tools = folder / "called", folder / "bin"
        tools.mkdir()
        (tools / "gs").write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
        (tools / "gs").chmod(0o755)
        with served(DOUBLES, env={"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}) as stand:
            text = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"
            answer = stand.audit(text, "a.eps")
        called = marker.exists()
    got = f"{answer.status_code}, gs {'called' if called else 'not called'}"
    return Outcome("400, gs not called", got, answer.status_code in (400, 415) and not called)


def formats_outside_of_the_list() -> Outcome:
    """Formats that nobody draws in; each reader is one more way in."""
    wrong = []
    for form in ("PPM", "TGA", "PCX", "SGI", "ICNS", "IM", "DDS", "SPIDER"):
        picture = GREY.convert("F") if form == "SPIDER" else GREY
        found = refused(encoded(picture, form), f"a.{form.lower()}")
        wrong += [] if found.as_expected else [f"{form} {found.got[:4].strip()}"]
    return Outcome("400, 413 or 415", ", ".join(wrong) or "all refused", not wrong)


def an_empty_file() -> Outcome:
    return refused(b"", "a.png")


def names_with_paths() -> Outcome:
    """A file name is nothing but a word in a message."""
    answer = DOUBLE_SERVICE.get().audit(b"nonsense", "../../etc/passwd\r\nX-Evil: 1")
    bad = answer.status_code >= 500 or "x-evil" in answer.headers
    return Outcome("400 without a new header", f"{answer.status_code}", not bad and answer.status_code == 400)


def damaged_everywhere() -> Outcome:
    """Every format that is taken, cut at every tenth."""
    wrong = []
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        data = encoded(GREY, form)
        for tenth in range(1, 10):
            code = DOUBLE_SERVICE.get().audit(data[: len(data) * tenth // 10], f"a.{form.lower()}").status_code
            wrong += [f"{form} at {tenth}: {code}"] if code >= 500 else []
    return Outcome("never a 5xx", "; ".join(wrong) or "none", not wrong)


ATTEMPTS = (
    a_plain_picture_is_flagged,
    sixteen_bit_grey,
    sixteen_bit_grey_tiff,
    thirty_two_bit_float,
    a_later_frame_of_a_gif,
    a_later_frame_of_an_apng,
    a_later_frame_of_a_webp,
    a_later_page_of_a_tiff,
    colours_under_a_low_alpha,
    colours_under_no_alpha_at_all,
    white_that_is_grey_on_black,
    a_palette_with_a_transparent_colour,
    turned_by_exif,
    a_malformed_dds,
    a_malformed_jpeg,
    a_malformed_im,
    a_malformed_avif,
    a_png_with_a_false_size,
    postscript_never_reaches_ghostscript,
    formats_outside_of_the_list,
    an_empty_file,
    names_with_paths,
    damaged_everywhere,
)
