"""Uploads over HTTP: every frame counts, every depth, and memory stays within its budget."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from random import Random

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from services import OPERATOR, bearer, make
from uploads import damaged_file, grey, refused_files, saved, valid_files

from guardpaint.serve.app import create_app
from guardpaint.serve.jobs import Overloaded
from guardpaint.serve.uploads import Memory
from guardpaint.testing.doubles import AlwaysSafe, FlagsBright

SIDE = 64
BOUND_MB = 700
"""What three pictures of 16 megapixels at once may add to the service's memory, with the default budget of 512 MB."""


@pytest.fixture(scope="module")
def client():
    """A service that flags bright pictures."""
    with TestClient(create_app(make(FlagsBright(gain=0.9))), raise_server_exceptions=False) as test:
        yield test


def send(test, data, secret=OPERATOR, **form):
    return test.post("/v1/audits", files={"image": ("a", data)}, data=form, headers=bearer(secret))


def plain(level, mode="RGB"):
    return Image.new("RGB", (SIDE, SIDE), (level,) * 3).convert(mode)


class FlagsDark(FlagsBright):
    def audit(self, images, prompts, noise):
        return super().audit(1 - images, prompts, noise)


@pytest.fixture(scope="module")
def dark_client():
    """A service that flags dark pictures, so that one that is taken for white passes."""
    with TestClient(create_app(make(FlagsDark(gain=0.9))), raise_server_exceptions=False) as test:
        yield test


def test_deep_greys_are_no_longer_white(dark_client):
    """Cut off at 255, which is what `convert` does, every value here would be white."""
    for image, form in (
        (grey(np.full((SIDE, SIDE), 3000), np.uint16), "PNG"),
        (grey(np.full((SIDE, SIDE), 3000), np.int32), "TIFF"),
        (grey(np.full((SIDE, SIDE), 0.1), np.float32), "TIFF"),
    ):
        answer = send(dark_client, saved(image, form)).json()
        assert answer["flagged"] and answer["reading"] in ("upper 8 of 16 bits", "from 0 to 1", "cut off at 255")
    assert not send(dark_client, saved(grey(np.full((SIDE, SIDE), 65535), np.uint16), "PNG")).json()["flagged"]


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_a_later_frame_is_found(client, form):
    frames = [plain(10), plain(30), plain(250), plain(20)]
    answer = send(client, saved(frames[0], form, save_all=True, append_images=frames[1:], duration=50)).json()
    assert answer["flagged"] and (answer["frame"], answer["frames"]) == (3, 4)
    calm = send(client, saved(frames[0], form, save_all=True, append_images=frames[1:2], duration=50)).json()
    assert not calm["flagged"] and (calm["frame"], calm["frames"]) == (2, 2)


def test_more_frames_than_the_bound_are_refused(client):
    frames = [plain(i % 7) for i in range(65)]
    answer = send(client, saved(frames[0], "TIFF", save_all=True, append_images=frames[1:]))
    assert answer.status_code == 413 and "64" in answer.json()["error"]["message"]


def test_colours_under_a_thin_alpha_are_found(client, dark_client):
    """Over white these are white, over black they are black; their own colours are neither."""
    thin = send(dark_client, saved(Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 3)), "PNG")).json()
    assert thin["flagged"] and thin["reading"] == "over black"
    under = send(client, saved(Image.new("RGBA", (SIDE, SIDE), (255, 255, 255, 3)), "PNG")).json()
    assert under["flagged"] and under["reading"] in ("over white", "without alpha")
    assert send(client, saved(plain(0), "PNG")).json()["reading"] == ""


def test_each_frame_counts_against_the_rate():
    from dataclasses import replace

    service = make(AlwaysSafe())
    keys = {OPERATOR: replace(service.settings.keys[OPERATOR], per_minute=5)}
    object.__setattr__(service.settings, "keys", keys)
    frames = [plain(i) for i in range(4)]
    data = saved(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    with TestClient(create_app(service), raise_server_exceptions=False) as test:
        assert [send(test, data).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("name", [*refused_files(), "junk"])
def test_other_formats_are_bad_requests(client, name):
    answer = send(client, refused_files().get(name, b"junk"))
    assert answer.status_code == 400 and "not an image" in answer.json()["error"]["message"]


def test_malformed_dds_im_jpeg_and_avif_are_bad_requests(client):
    """These made the service answer 500."""
    jpeg, avif = valid_files()["jpeg-RGB"], refused_files()["AVIF"]
    for data in (b"DDS " + bytes(20), b"Image type: RGB\r\n\x1a", jpeg[:22], b"\xff\xd8\xff\xe0\0\1", avif[:60]):
        assert send(client, data).status_code == 400


@given(st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None, database=None)
def test_no_upload_is_an_internal_error(client, seed):
    answer = send(client, damaged_file(Random(seed)))
    assert answer.status_code in (200, 400, 413), answer.text


def test_a_picture_over_the_bound_is_refused_with_its_size(client):
    answer = send(client, saved(Image.new("1", (8000, 8000)), "PNG"))
    message = answer.json()["error"]["message"]
    assert answer.status_code == 413 and "8000×8000 is 64.0 megapixels" in message and "16.8" in message


def test_a_shrunk_picture_says_so_and_keeps_its_boxes():
    """Boxes are in pixels of the picture that was sent, turned upright."""
    image = plain(150).resize((200, 100))
    image.paste((255, 255, 255), (0, 0, 200, 30))
    with TestClient(create_app(make(FlagsBright(), longest_side=50))) as test:
        answer = send(test, saved(image, "PNG")).json()
        assert answer["size"] == [200, 100] and answer["shrunk_to"] == [50, 25] and answer["flagged"]
        x, y, width, height = answer["boxes"][0]
        assert (x, y) == (0, 0) and width == 200 and 10 <= height <= 50
        exif = Image.Exif()
        exif[274] = 6
        turned = send(test, saved(image, "PNG", exif=exif)).json()
        assert turned["size"] == [100, 200] and turned["shrunk_to"] == [25, 50]
    with TestClient(create_app(make(FlagsBright()))) as test:
        assert send(test, saved(image, "PNG")).json()["shrunk_to"] is None


# The budget ----------------------------------------------------------------------------------------------------


def test_shares_are_given_in_turn():
    order = []

    async def run():
        memory = Memory(100, 5.0)

        async def hold(name, size):
            async with memory.share(size):
                order.append(name)
                assert memory.free >= 0
                await asyncio.sleep(0.02)

        await asyncio.gather(*(hold(n, s) for n, s in (("a", 60), ("b", 60), ("c", 30), ("d", 500))))
        assert memory.free == 100 and not memory.waiting

    asyncio.run(run())
    assert order == ["a", "b", "c", "d"]


def test_a_share_that_does_not_come_is_refused():
    async def run():
        memory = Memory(100, 0.05)
        async with memory.share(80):
            large = asyncio.create_task(memory.take(40))
            await asyncio.sleep(0.03)
            small = asyncio.create_task(memory.take(10))
            with pytest.raises(Overloaded, match="try again"):
                await large
            await small
            gone = asyncio.create_task(memory.take(40))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
        memory.give(10)
        assert memory.free == 100 and not memory.waiting

    asyncio.run(run())


class Slow(AlwaysSafe):
    def audit(self, images, prompts, noise):
        time.sleep(1.0)
        return super().audit(images, prompts, noise)


def test_an_upload_that_gets_no_turn_is_refused_with_503():
    from concurrent.futures import ThreadPoolExecutor

    data = saved(plain(9), "PNG")
    with (
        TestClient(
            create_app(make(Slow(), upload_memory=1000, upload_patience=0.2)), raise_server_exceptions=False
        ) as test,
        ThreadPoolExecutor(3) as pool,
    ):
        answers = list(pool.map(lambda _: send(test, data), range(3)))
    assert sorted(a.status_code for a in answers) == [200, 503, 503]
    assert all("retry-after" in a.headers for a in answers if a.status_code == 503)


SERVER = """
import io, resource, sys, threading, time
sys.path.insert(0, {tests!r})
import httpx
from helpers import serving
from PIL import Image
from services import USER, bearer, make
from guardpaint.serve.app import create_app
from guardpaint.testing.doubles import FlagsBright

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def post(address, data, answers):
    files = {{"image": ("a", data)}}
    answers.append(httpx.post(address + "/v1/audits", files=files, headers=bearer(USER), timeout=200).status_code)

def at_once(address, data):
    answers = []
    threads = [threading.Thread(target=post, args=(address, data, answers)) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return answers

with serving(create_app(make(FlagsBright(), slow_client=60.0, upload_patience=250.0))) as address:
    small = io.BytesIO()
    Image.new("RGBA", (64, 64), (9, 9, 9, 99)).save(small, "PNG")
    at_once(address, small.getvalue())
    before = peak()
    for name in sys.argv[1:]:
        print(*at_once(address, open(name, "rb").read()), round(peak() - before))
"""


def test_memory_stays_within_its_bound(tmp_path):
    """Three at once, over the bound of pixels and just under it, to a service in a process of its own."""
    from pathlib import Path

    sizes = {"64mp.png": ("LA", 8000), "16mp.png": ("RGBA", 4096), "16mp.webp": ("RGBA", 4096)}
    for name, (mode, side) in sizes.items():
        image = Image.new("L", (side, side), 40).convert(mode)
        if mode == "RGBA":
            image.putalpha(90)
        image.save(tmp_path / name, **({"compress_level": 1} if name.endswith("png") else {}))
        del image
    code = SERVER.format(tests=str(Path(__file__).parents[1]))
    run = [sys.executable, "-c", code, *(str(tmp_path / name) for name in sizes)]
    result = subprocess.run(run, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [[int(n) for n in line.split()] for line in result.stdout.splitlines()]
    assert [row[:3] for row in rows] == [[413] * 3, [200] * 3, [200] * 3]
    print(rows)
    assert rows[0][3] < 100 and rows[-1][3] < BOUND_MB, rows
