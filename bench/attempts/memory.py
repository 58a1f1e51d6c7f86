"""Small uploads that unpack to very large pictures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from attempts import Outcome
from attempts.processes import Peak
from attempts.stand import DOUBLES, encoded, served

ALLOWED = 300.0
"""MB that the service may grow by while it answers."""


def large_png(side: int) -> bytes:
    """A PNG of one bit a pixel: a few kilobytes, whatever its size."""
    return encoded(Image.new("1", (side, side)), optimize=True)


def many_frames(form: str, frames: int, side: int) -> bytes:
    """An animated picture whose frames differ in nothing but a corner."""
    pages = [Image.new("P", (side, side), i % 7) for i in range(frames)]
    for i, page in enumerate(pages):
        page.putpixel((i % side, 0), 9)
    return encoded(pages[0], form, save_all=True, append_images=pages[1:])


def bounded(data: bytes, count: int) -> Outcome:
    """Send one file `count` times at once."""
    with served(DOUBLES) as stand:
        stand.audit(large_png(64))  # warm-up
        with Peak(stand.megabytes) as peak, ThreadPoolExecutor(count) as pool:
            codes = sorted({a.status_code for a in pool.map(lambda _: stand.audit(data), range(count))})
        fits = peak.value < ALLOWED and set(codes) <= {200, 400, 413, 429, 503}
        got = f"{len(data) / 1000:.0f} kB: {codes}, {peak.value:.0f} MB"
        return Outcome(f"answered or refused within {ALLOWED:.0f} MB", got, fits)


def one_large_upload() -> Outcome:
    return bounded(large_png(8000), 1)


def three_large_uploads_at_once() -> Outcome:
    return bounded(large_png(8000), 3)


def pictures_of_many_sizes() -> Outcome:
    """Wherever the limit on pixels lies, one of these comes close to it."""
    expected, largest, codes = f"within {ALLOWED:.0f} MB", 0.0, {}
    with served(DOUBLES) as stand:
        stand.audit(large_png(64))  # warm-up
        for side in (1000, 2000, 3000, 4000, 5000, 6000):
            with Peak(stand.megabytes) as peak, ThreadPoolExecutor(3) as pool:
                data = large_png(side)
                codes[side] = max(a.status_code for a in pool.map(lambda _, d=data: stand.audit(d), range(3)))
            largest = max(largest, peak.value)
    fits = largest < ALLOWED and set(codes.values()) <= {200, 400, 413, 429, 503}
    return Outcome(expected, f"{largest:.0f} MB, three at once: {codes}", fits)


def an_animation_with_many_frames() -> Outcome:
    return bounded(many_frames("GIF", 400, 1000), 1)


def a_large_jpeg() -> Outcome:
    return bounded(encoded(Image.new("RGB", (6000, 6000)), "JPEG", quality=10), 2)


ATTEMPTS = (
    one_large_upload,
    three_large_uploads_at_once,
    pictures_of_many_sizes,
    an_animation_with_many_frames,
    a_large_jpeg,
)
