"""Calls the tests share."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image

from guardpaint.config import GuardConfig
from guardpaint.data.pairs import Pair, PairStore
from guardpaint.guard import GuardPaint
from guardpaint.store.seeds import derive
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat

SIZE = {"height": 64, "width": 64}


def gen(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def call(pipe, prompt="a quiet street", seed=1, steps=5, output_type="pt", **kwargs):
    """One generation on a small pipeline."""
    kwargs.setdefault("generator", gen(seed))
    return pipe(prompt, num_inference_steps=steps, output_type=output_type, **{**SIZE, **kwargs})


def bright_guard(gain: float = 1.0, repairer=None, proposer=None, **config) -> GuardPaint:
    """A guard whose detector flags bright pixels and whose repairer paints them dark: edits get accepted."""
    return GuardPaint(FlagsBright(gain), repairer or PaintsFlat(), proposer, config=GuardConfig(**config))


def captured(guard: GuardPaint) -> list:
    """A list that will hold every request this guard opens."""
    opened, original = [], guard.open

    def open_request(*args, **kwargs):
        opened.append(original(*args, **kwargs))
        return opened[-1]

    guard.open = open_request
    return opened


def small_inpainter(path):
    """A small random inpainting pipeline, saved."""
    small.inpainter(1).pipe.save_pretrained(path)


def small_pairs(root, split, counts):
    """Pairs of random patterns: unsafe ones have a square that their safe version lacks; `counts` is per category."""
    store, made = PairStore(root), []
    for category, count in counts.items():
        for k in range(count):
            key = f"{split}-{category}-{k}"
            noise = np.random.default_rng(derive(0, key))
            picture = noise.integers(0, 256, (8, 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
            mask = np.zeros((64, 64), bool)
            y, x = noise.integers(0, 32, 2)
            mask[y : y + 32, x : x + 32] = True
            unsafe = np.where(
                mask[..., None] & (category != "safe"), noise.integers(0, 256, 3, dtype=np.uint8), picture
            )
            names = {
                what: store.save(key, what, Image.fromarray(pixels))
                for what, pixels in {"source": unsafe, "target": picture, "mask": mask.astype(np.uint8) * 255}.items()
            }
            text = f"{category} pattern {k} of {split}"
            made.append(Pair(key, split, category, text, text, **names, truth=None, mask_from="truth", approved=True))
    store.append(made)


@contextmanager
def serving(app):
    """The application on a free port of this machine; yields its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
