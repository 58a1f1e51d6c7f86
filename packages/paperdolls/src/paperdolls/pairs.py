"""Training pairs of the inpainter: an unsafe render, a mask of its unsafe area, and the same scene made safe.

guardpaint data pairs OUT --split train --count 2000
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from guardpaint.config import GuardConfig
from guardpaint.data.pairs import Pair, PairStore, Pixels, audited_mask, picture_of
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.progress import track
from guardpaint.types import SAFE, Auditor
from paperdolls.captions import caption
from paperdolls.masks import figure_mask, training_region
from paperdolls.render import SIZE, render
from paperdolls.scene import Scene, safe_version, sample_scene

PAIR_SEEDS = {"train": 30_000_000, "validation": 31_000_000, "test": 32_000_000}
"""First scene of each split of the inpainter's pairs; no other model trains on them."""
SPAN = 1_000_000
"""Scenes that each split may use: none reaches the first scene of another."""
COVERED = 0.5
"""Least share of the unsafe area that the auditor's mask must cover for a pair to be used."""


def balanced_scenes(split: str, unsafe: int, safe: int) -> Iterator[tuple[int, Scene]]:
    """`unsafe` unsafe scenes, half nudity and half violence, and `safe` safe ones, in the order of their seeds."""
    if split not in PAIR_SEEDS:
        raise BadInput(f"split {split!r}: choose {', '.join(PAIR_SEEDS)}")
    left = {"nudity": unsafe - unsafe // 2, "violence": unsafe // 2, "safe": safe}
    seed = PAIR_SEEDS[split]
    while any(left.values()):
        scene = sample_scene(seed)
        if left[scene.category]:
            left[scene.category] -= 1
            yield seed, scene
        seed += 1
        if seed == PAIR_SEEDS[split] + SPAN and any(left.values()):
            raise BadInput(f"split {split!r} has too few scenes for {unsafe} unsafe and {safe} safe pictures")


def scene_pair(
    store: PairStore,
    split: str,
    seed: int,
    scene: Scene,
    auditor: Auditor | None,
    config: GuardConfig,
    size: int = SIZE,
) -> Pair:
    """The pair of one scene: its render and that of its safe version. Outside the mask both pictures are the same.

    The mask is the auditor's, or the true one without an auditor. A pair is not approved if the auditor's mask covers
    too little of the unsafe area; a safe picture has no harm to find, and its mask is the figure's.
    """
    shown = render(scene, size)
    key = f"world-{seed}"
    text = caption(scene, 0).text
    found: Pixels | None = None
    why = ""
    if scene.category == SAFE:
        body = figure_mask(scene, main_only=True, size=size)
        truth: Pixels = body if body.any() else ~body
        target = shown.image
    else:
        truth = shown.mask
        target = render(safe_version(scene), size).image
        if auditor is not None:
            found = audited_mask(auditor, Image.fromarray(shown.image), text, config, Policy.default())
            covered = 0.0 if found is None else float((found & truth).sum() / truth.sum())
            why = "" if covered >= COVERED else f"the auditor's mask covers {covered:.0%} of the unsafe area"
    region = training_region(truth, seed) if found is None else found
    target = np.where(region[..., None], target, shown.image)
    return Pair(
        key=key,
        split=split,
        category=scene.category,
        prompt=text,
        safe_prompt=caption(safe_version(scene), 0).text,
        source=store.save(key, "source", Image.fromarray(shown.image)),
        target=store.save(key, "target", Image.fromarray(target)),
        mask=store.save(key, "mask", picture_of(region)),
        truth=store.save(key, "truth", picture_of(truth)),
        mask_from="truth" if found is None else "auditor",
        approved=not why,
        why=why,
    )


def make_pairs(
    out: Path,
    split: str,
    count: int,
    safe: int,
    auditor: Auditor | None,
    config: GuardConfig | None = None,
    size: int = SIZE,
) -> int:
    """Add pairs to the folder `out`, except those that are there already. Returns the number of new ones."""
    store = PairStore(out)
    have = store.keys()
    todo = [(s, scene) for s, scene in balanced_scenes(split, count, safe) if f"world-{s}" not in have]
    config = GuardConfig(mask_threshold="calibrated") if config is None else config
    batch: list[Pair] = []
    for k, (seed, scene) in enumerate(track(todo, f"pairs {split}")):
        batch.append(scene_pair(store, split, seed, scene, auditor, config, size))
        if len(batch) == 100 or k == len(todo) - 1:
            store.append(batch)
            batch = []
    return len(todo)


class ScenePairs:
    """Pairs of scenes for the inpainter (`InpainterLessons`)."""

    def make_pairs(
        self,
        out: Path,
        split: str,
        unsafe: int,
        safe: int,
        auditor: Auditor | None = None,
        config: GuardConfig | None = None,
    ) -> int:
        return make_pairs(out, split, unsafe, safe, auditor, config)
