"""A service refuses what its guard was not calibrated for."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image
from services import CALL, bearer, make
from starlette.testclient import TestClient

from guardpaint.config import Scope
from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.serve.app import create_app
from guardpaint.store.images import png_bytes
from guardpaint.store.uploads import Upload
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat

SCOPE = Scope(side=64, pixels=(64, 96), guidance=(1.0, 8.0), steps=(2, 10))


@pytest.fixture(scope="module")
def client():
    service = make(guard=GuardPaint(AlwaysSafe(), PaintsFlat()).configured(scope=SCOPE))
    with TestClient(create_app(service), headers=bearer()) as http:
        yield http


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"size": "128x128"}, "128x128 pixels (both sides from 64 to 96)"),
        ({"size": "32x64"}, "32x64 pixels"),
        ({"guidance_scale": 15}, "guidance 15 (from 1 to 8)"),
        ({"num_inference_steps": 1}, "1 steps (from 2 to 10)"),
    ],
    ids=["large", "small", "guidance", "steps"],
)
def test_other_settings_are_refused_and_named(client, body, what):
    answer = client.post("/v1/images/generations", json={"prompt": "a quiet street", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "outside_calibration" and what in error["message"]


def test_settings_within_are_drawn(client):
    answer = client.post("/v1/images/generations", json={"prompt": "a quiet street", "size": "64x96"})
    assert answer.status_code == 200


@pytest.mark.parametrize(("size", "status"), [((64, 64), 200), ((96, 64), 200), ((32, 64), 400), ((300, 64), 400)])
def test_uploads_are_held_to_the_sizes_too(client, size, status):
    data = png_bytes(Image.new("RGB", size, "gray"))
    answer = client.post("/v1/audits", files={"image": ("a.png", data, "image/png")})
    assert answer.status_code == status
    if status == 400:
        assert f"{size[0]}x{size[1]} pixels" in answer.json()["error"]["message"]


def test_sizes_of_uploads_are_checked_before_anything_is_decoded(client, monkeypatch):
    """Also that of a later page: the first one is not decoded and audited in vain."""

    def decode(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr(Upload, "decode", decode)
    fits, small, large = (Image.new("RGB", size, "gray") for size in ((64, 64), (32, 64), (4000, 4000)))
    pages = io.BytesIO()
    fits.save(pages, "TIFF", save_all=True, append_images=[small])
    for data, what in ((png_bytes(large), "4000x4000 pixels"), (pages.getvalue(), "32x64 pixels")):
        answer = client.post("/v1/audits", files={"image": ("a", data, "image/png")})
        assert answer.status_code == 400 and what in answer.json()["error"]["message"]
    answer = client.post("/v1/audits", files={"image": ("a", png_bytes(fits), "image/png")})
    assert "AssertionError: decoded" in answer.json()["error"]["message"]


def test_a_base_with_other_settings_is_not_served():
    scope = replace(SCOPE, steps=(CALL["num_inference_steps"] + 1, 10))
    with pytest.raises(BadConfig, match="2 steps"):
        make(guard=GuardPaint(AlwaysSafe(), PaintsFlat()).configured(scope=scope))
