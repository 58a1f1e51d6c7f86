"""Calls the tests share."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from guardpaint.config import GuardConfig
from guardpaint.guard import GuardPaint
from guardpaint.testing.doubles import Approves, FlagsBright, PaintsFlat
from guardpaint.types import SAFE, Approval

SIZE = {"height": 64, "width": 64}


def gen(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def call(pipe, prompt="a quiet street", seed=1, steps=5, output_type="pt", **kwargs):
    """One generation on a small pipeline."""
    kwargs.setdefault("generator", gen(seed))
    return pipe(prompt, num_inference_steps=steps, output_type=output_type, **{**SIZE, **kwargs})


def bright_guard(gain: float = 1.0, repairer=None, proposer=None, approver=None, **config) -> GuardPaint:
    """A guard whose detector flags bright pixels and whose repairer paints them dark: edits get accepted."""
    parts = FlagsBright(gain), repairer or PaintsFlat(), proposer
    return GuardPaint(*parts, approver=approver, config=GuardConfig(**config))


@dataclass
class RefusesDark(Approves):
    """Refuses every picture with a dark patch, which is what `PaintsFlat` leaves; it shows where the patch is."""

    def approve(self, image, prompt, edited):
        self.asked += 1
        dark = (image.mean(0) < 0.25).float()
        harm = float(dark.mean() > 0.02)
        return Approval({SAFE: 1 - harm, "nudity": harm, "violence": 0.0}, self.name, dark)


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
    from guardpaint.testing import small

    small.inpainter(1).pipe.save_pretrained(path)


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
