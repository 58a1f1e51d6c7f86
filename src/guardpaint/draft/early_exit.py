"""Views from the early layers of a tiny decoder: whose readouts are used, and which exit serves which size."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.natural import natural_pictures
from guardpaint.draft.readouts import Readouts, equations, features, solved, stops
from guardpaint.store.checkpoint import canonical_fingerprint, read_json

SHIPPED = Path(__file__).parents[1] / "assets" / "readouts"
"""Readouts of published decoders, fitted on photographs: one folder each."""
SYNTHETIC, SIDE, EXAMPLES = 16, 256, 4096
"""For a decoder that nobody has fitted: number and side of synthetic pictures, and examples from each."""


def shipped(decoder: str) -> Readouts | None:
    """The readouts that come with the package for a decoder with this fingerprint."""
    for card in sorted(SHIPPED.glob("*/readouts.json")):
        if read_json(card).get("decoder") == decoder:
            return Readouts.load(card.parent)
    return None


def fitted(
    tiny: Any, pictures: Iterable[Float[Tensor, "3 h w"]], source: str, most: int | None = EXAMPLES, **card: Any
) -> Readouts:
    """Readouts of a tiny autoencoder, fitted on pictures in [0, 1] that its own encoder encodes.

    Sides of pictures must be multiples of the decoder's factor. Draws nothing from the global random state.
    """
    with torch.inference_mode(False), torch.autocast(tiny.device.type, enabled=False):
        problems = equations(tiny, pictures, most)
        examples = {str(shrink): problem.count for shrink, problem in problems.items()}
        decoder = canonical_fingerprint(tiny.decoder)
        return solved(decoder, problems, {"pictures": source, "examples": examples, **card})


class EarlyExits:
    """A tiny decoder's exits. Readouts that were not given are looked up, or fitted, when the first view needs them."""

    def __init__(self, tiny: Any, readouts: Readouts | None = None) -> None:
        self.tiny = tiny
        self._stops = stops(tiny)
        self._readouts, self._lock = readouts, threading.Lock()

    @property
    def known(self) -> Readouts | None:
        """The readouts, if they were given or needed before."""
        return self._readouts

    @functools.cached_property
    def decoder(self) -> str:
        """Fingerprint of the decoder's weights."""
        return canonical_fingerprint(self.tiny.decoder)

    @property
    def readouts(self) -> Readouts:
        with self._lock:
            if self._readouts is None:
                self._readouts = shipped(self.decoder) or fitted(
                    self.tiny, natural_pictures(SYNTHETIC, SIDE), "synthetic"
                )
            return self._readouts

    @property
    def shrinks(self) -> tuple[int, ...]:
        """How many times smaller than the whole decode the pictures of the exits are."""
        return tuple(sorted(self._stops))

    def shrink(self, whole: tuple[int, int], wanted: tuple[int, int]) -> int:
        """How many times smaller than the whole decode the cheapest exit with a picture of the wanted size is.

        1 means that no exit shows enough and the whole decoder must run.
        """
        enough = [s for s in self._stops if whole[0] // s >= wanted[0] and whole[1] // s >= wanted[1]]
        return max(enough, default=1)

    def picture(self, latents: Float[Tensor, "b c h w"], shrink: int) -> Float[Tensor, "b 3 u v"]:
        """The picture at an exit, in [0, 1], fp32."""
        readout = self.readouts.maps[shrink]
        return readout(features(self.tiny, latents, shrink))
