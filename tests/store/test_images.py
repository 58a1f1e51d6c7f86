"""Pictures in memory: bytes and addresses that decode to the same pixels."""

from __future__ import annotations

import base64

import numpy as np
from PIL import Image

from guardpaint.store.images import data_url, load_bytes, png_bytes, save_image


def test_a_png_in_memory_is_the_picture(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    data = png_bytes(image)
    assert (np.array(load_bytes(data, "x")) == np.array(image)).all()
    kind, _, text = data_url(image).partition(",")
    assert kind == "data:image/png;base64" and base64.b64decode(text) == data
    save_image(image, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == data
