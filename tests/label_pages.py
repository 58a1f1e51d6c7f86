"""A running labelling page and pictures for it, for the tests of both."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from PIL import Image

from guardpaint.data import label_page
from guardpaint.policy import Policy

POLICY = Policy.load("paper")


def grey_pictures(folder):
    """Six grey pictures of different shades, in folders of two kinds."""
    for i in range(6):
        place = folder / ("swimwear" if i < 3 else "sport")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (40 * i, 40 * i, 40 * i)).save(place / f"{i}.png")
    return folder


@contextmanager
def label_page_of(pictures, out, labeller="ann", **more):
    """A running page; yields its address."""
    session = label_page.Session(label_page.find_items(pictures), POLICY, labeller, out, **more)
    server, address = label_page.page_server(session)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
