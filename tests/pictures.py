"""Small pictures to train on: patterns that show nothing."""

from __future__ import annotations

import numpy as np
from PIL import Image

from guardpaint.data.pairs import Pair, PairStore
from guardpaint.store.seeds import derive


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
