"""Pictures from strangers: what is refused, and what an audit gets to see of the rest."""

from __future__ import annotations

import struct
import tracemalloc
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from uploads import chunk, damaged_file, grey, noise, png16, refused_files, saved, tiff_with_tags, valid_files

from guardpaint.errors import BadInput, TooLarge
from guardpaint.store.containers import MOST_SCANS, gif
from guardpaint.store.images import as_rgb, from_pil, load_bytes
from guardpaint.store.uploads import Limits, Upload

SIDE = 32


def readings(data: bytes, **limits):
    return list(Upload(data, "file", Limits(**limits)).readings())


def colour(image: Image.Image):
    """The mean colour of a picture."""
    return tuple(np.asarray(image).reshape(-1, 3).mean(0).round().astype(int).tolist())


def colours_of(data: bytes):
    return {r.name: colour(r.image) for r in readings(data)}


# What is read, and what not ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", valid_files())
def test_every_accepted_kind_is_read(name):
    found = readings(valid_files()[name])
    assert found and all(r.image.mode == "RGB" for r in found)
    moving = {"gif-moving": 3, "webp-moving": 3, "png-moving": 3, "png-default": 3, "tiff-pages": 3, "mpo": 3}
    assert {r.frame for r in found} == set(range(1, moving.get(name, 1) + 1))


@pytest.mark.parametrize("name", refused_files())
def test_other_formats_are_never_tried(name):
    with pytest.raises(BadInput, match="not an image in a format that is read"):
        readings(refused_files()[name])
    with pytest.raises(BadInput, match="not an image in a format that is read"):
        load_bytes(refused_files()[name], "file")


def test_ghostscript_is_never_called(monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *a, **k: pytest.fail("Ghostscript was called"))
    with pytest.raises(BadInput):
        readings(refused_files()["EPS"])


@pytest.mark.parametrize("name", valid_files())
def test_truncated_files_are_refused(name):
    data = valid_files()[name]
    for cut in sorted({*range(1, len(data) - 8, max(1, len(data) // 12)), len(data) // 2}):
        try:
            Upload(data[:cut], "file", Limits())
            found = readings(data[:cut])
        except BadInput:
            continue
        pixels = [np.asarray(r.image) for r in found]  # only bytes that are no part of the picture may be missing
        assert all((a == np.asarray(b.image)).all() for a, b in zip(pixels, readings(data), strict=True)), cut


@given(st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None, database=None)
def test_damaged_files_are_refused_or_read(seed):
    data = damaged_file(Random(seed))
    for use in (lambda: readings(data, largest_pixels=2**18), lambda: from_pil(load_bytes(data, "file"))):
        try:
            use()
        except BadInput:
            continue


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None, database=None)
def test_noise_is_refused(data):
    with pytest.raises(BadInput):
        readings(data)


# Bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_pixels_are_bounded_before_decoding(form):
    image = Image.new("RGB", (1000, 900))
    data = saved(image.convert("P") if form == "GIF" else image, form)
    tracemalloc.start()
    with pytest.raises(TooLarge, match=r"1000×900 is 0.9 megapixels; at most 0.5"):
        Upload(data, "file", Limits(largest_pixels=500_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(data) + 500_000


@pytest.mark.parametrize("name", ["gif-moving", "webp-moving", "png-moving", "tiff-pages", "mpo"])
def test_all_frames_count(name):
    data, pixels = valid_files()[name], 23 * 17
    assert len(readings(data, largest_pixels=3 * pixels, most_frames=3)) == 3
    with pytest.raises(TooLarge, match="in 3 frames"):
        readings(data, largest_pixels=3 * pixels - 1)
    with pytest.raises(TooLarge, match="frames; every frame is audited"):
        readings(data, most_frames=2)


def test_a_gif_cannot_grow_its_canvas_unseen():
    """The second frame lies outside of the canvas, which then grows to hold it."""
    data = bytearray(valid_files()["gif-moving"])
    assert gif(bytes(data), "x", 9) == (3, (23, 17))
    second = data.index(b"\x2c", data.index(b"\x21\xf9", data.index(b"\x2c") + 1))
    data[second + 1 : second + 5] = struct.pack("<HH", 9000, 9000)
    assert gif(bytes(data), "x", 9)[1][0] > 9000
    with pytest.raises(TooLarge):
        Upload(bytes(data), "file", Limits())


def test_frames_hidden_from_the_count_are_refused():
    """Some viewers show the frames that are there, others as many as are declared."""
    data = valid_files()["png-moving"]
    place = data.index(b"acTL")
    hidden = data[: place - 4] + chunk(b"acTL", struct.pack(">II", 1, 0)) + data[place + 16 :]
    with pytest.raises(BadInput, match="declares 1 frames and has 3"):
        readings(hidden)


def test_text_in_a_png_is_not_unpacked():
    import zlib

    data = valid_files()["png-RGB"]
    bomb = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(900_000)))
    stuffed = data[:33] + bomb * 60 + data[33:]
    tracemalloc.start()
    assert len(readings(stuffed)) == 1
    assert tracemalloc.get_traced_memory()[1] < 3_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([(700, 3, 4_000_000, 0)], "tags hold"),
        ([(65000 - i, 1, 150, 0) for i in range(500)], "tags hold"),
        ([(322, 4, 1, 60_000), (323, 4, 1, 60_000)], "tiles of 60000×60000"),
        ([(34665, 4, 1, 2**31)], "damaged"),
    ],
)
def test_tiff_tags_are_bounded(entries, words):
    with pytest.raises(BadInput, match=words):
        readings(tiff_with_tags(entries))


def test_a_plain_tiff_passes_the_same_check():
    assert len(readings(tiff_with_tags([]))) == 1


def test_directories_in_a_circle_end():
    circle = tiff_with_tags([])
    circle = circle[:-4] + struct.pack("<I", 72)
    assert len(readings(circle)) == 1


def test_scans_of_a_jpeg_are_bounded():
    data = valid_files()["jpeg-progressive"]
    with pytest.raises(BadInput, match="scans"):
        readings(data[:-2] + b"\xff\xda\x00\x02" * MOST_SCANS + data[-2:])


def test_large_pictures_are_shrunk_once():
    (reading,) = readings(saved(Image.new("RGB", (900, 300), "red"), "PNG"), longest_side=300)
    assert reading.image.size == (300, 100) and reading.size == (900, 300) and colour(reading.image) == (255, 0, 0)
    (reading,) = readings(saved(Image.new("RGB", (900, 300), "red"), "JPEG"), longest_side=100)
    assert reading.image.size in ((100, 33), (100, 34)) and reading.size == (900, 300)


def test_limits_must_be_positive():
    with pytest.raises(BadInput.__mro__[1], match="most_frames=0"):
        Limits(most_frames=0)


# What an audit sees --------------------------------------------------------------------------------------------


def test_deep_greys_keep_their_depth():
    values = np.full((SIDE, SIDE), 300)
    values[: SIDE // 2] = 30_000
    dark = saved(grey(values, np.uint16), "PNG")
    seen = {r.name: np.asarray(r.image)[[0, -1], 0, 0].tolist() for r in readings(dark)}
    assert seen == {"upper 8 of 16 bits": [117, 1], "cut off at 255": [255, 255], "stretched": [255, 0]}
    assert np.asarray(as_rgb(load_bytes(dark, "x")))[[0, -1], 0, 0].tolist() == [117, 1]
    seen = {
        r.name: np.asarray(r.image)[[0, -1], 0, 0].tolist()
        for r in readings(saved(grey(values / 60_000, np.float32), "TIFF"))
    }
    assert seen["from 0 to 1"] == [128, 1]
    seen = {r.name for r in readings(saved(grey(values, np.int32), "TIFF"))}
    assert seen == {"upper 8 of 16 bits", "cut off at 255", "stretched"}


def test_a_16_bit_grey_picture_is_the_8_bit_one():
    small = np.asarray(noise("L"))
    found = readings(saved(grey(small.astype(np.uint16) * 257, np.uint16), "PNG"))
    assert (np.asarray(found[0].image)[..., 0] == small).all()


def test_16_bit_colours_keep_their_depth():
    pixels = np.zeros((4, 4, 3), np.uint16)
    pixels[:] = (200 * 257, 100 * 257, 50 * 257)
    assert colours_of(png16(pixels)) == {"": (200, 100, 50)}


def test_white_may_be_zero():
    data = saved(grey(np.tile(np.arange(SIDE) * 2000, (SIDE, 1)), np.uint16), "TIFF")
    place = data.index(struct.pack("<HHI", 262, 3, 1))
    inverted = data[: place + 8] + struct.pack("<H", 0) + data[place + 10 :]
    assert {r.name for r in readings(inverted)} > {r.name for r in readings(data)}


def test_a_float_picture_without_numbers_is_refused():
    with pytest.raises(BadInput, match="NaN"):
        readings(saved(grey(np.full((4, 4), np.nan), np.float32), "TIFF"))


def test_alpha_is_read_in_three_ways():
    ways = {"over white": (252, 252, 255), "over black": (0, 0, 3), "without alpha": (0, 0, 255)}
    assert colours_of(saved(Image.new("RGBA", (SIDE, SIDE), (0, 0, 255, 3)), "PNG")) == ways
    assert colours_of(saved(Image.new("RGBA", (SIDE, SIDE), (0, 0, 255, 255)), "PNG")) == {"": (0, 0, 255)}
    clear = colours_of(saved(Image.new("LA", (SIDE, SIDE), (90, 0)), "PNG"))
    assert clear == {"over white": (255,) * 3, "over black": (0,) * 3, "without alpha": (90,) * 3}


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_transparent_palette_entry_keeps_its_colour(form):
    image = Image.new("P", (SIDE, SIDE), 1)
    image.putpalette([0, 0, 0, 200, 10, 10])
    found = colours_of(saved(image, form, transparency=1))
    assert found == {"over white": (255,) * 3, "over black": (0,) * 3, "without alpha": (200, 10, 10)}


def test_a_transparent_grey_of_16_bits():
    values = np.full((SIDE, SIDE), 40_000)
    values[0, 0] = 7
    data = saved(grey(values, np.uint16), "PNG")
    keyed = data[:33] + chunk(b"tRNS", struct.pack(">H", 40_000)) + data[33:]
    found = colours_of(keyed)
    assert min(found["upper 8 of 16 bits, over white"]) >= 254 and max(found["upper 8 of 16 bits, over black"]) == 0
    assert found["upper 8 of 16 bits, without alpha"] == (156,) * 3


def test_equal_ways_and_frames_are_read_once():
    frame = Image.new("RGB", (SIDE, SIDE), "red")
    other = frame.copy()
    other.putpixel((0, 0), (0, 0, 0))
    data = saved(frame, "TIFF", save_all=True, append_images=[frame, other, frame])
    assert [r.frame for r in readings(data)] == [1, 3]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(form, orientation):
    """The corner that is red in the upright picture is red in the audit."""
    upright = Image.new("RGB", (40, 24), "blue")
    upright.paste((255, 0, 0), (0, 0, 20, 12))
    T = Image.Transpose
    undo = {
        2: T.FLIP_LEFT_RIGHT,
        3: T.ROTATE_180,
        4: T.FLIP_TOP_BOTTOM,
        5: T.TRANSPOSE,
        6: T.ROTATE_90,
        7: T.TRANSVERSE,
        8: T.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if form == "WEBP" else {}
    (reading,) = readings(saved(stored, form, exif=exif, **options), longest_side=20)
    assert reading.size == (40, 24) and reading.image.size == (20, 12)
    red, _, blue = reading.image.getpixel((3, 2))
    assert red > 200 and blue < 60
