"""Masks to inpaint: they cover the figures, and every shape is non-empty and repeatable."""

from __future__ import annotations

import numpy as np
import pytest

from paperdolls.masks import boxed, figure_mask, grown, training_mask
from paperdolls.render import render
from paperdolls.scene import sample_scene


@pytest.mark.parametrize("kind", ["nudity", "splash", "blade"])
def test_the_figures_cover_what_is_unsafe(kind):
    """Unsafe pixels lie within the figures' pixels, but for those that happen to match the backdrop."""
    covered = [
        (figure_mask(s) & render(s).mask).sum() / render(s).mask.sum()
        for s in (sample_scene(seed, kind, "flat") for seed in range(30))
    ]
    assert np.mean(covered) > 0.8


def test_no_figures_no_mask():
    assert not figure_mask(sample_scene(3, "empty", "flat")).any()


def test_the_main_figure_is_part_of_all():
    for seed in range(20):
        scene = sample_scene(seed, "crowd", "flat")
        main, everybody = figure_mask(scene, main_only=True), figure_mask(scene)
        assert main.sum() < everybody.sum()


def test_grown_and_boxed_by_hand():
    dot = np.zeros((64, 64), bool)
    dot[10, 20] = True
    assert grown(dot, 2).sum() == 25 and boxed(dot, 1).sum() == 9 and boxed(dot, 0).sum() == 1
    assert boxed(np.zeros((64, 64), bool), 3).all()


def test_training_masks_are_repeatable_and_never_empty():
    shares = []
    for seed in range(200):
        scene = sample_scene(seed)
        mask = training_mask(scene, 0)
        assert mask.any() and np.array_equal(mask, training_mask(scene, 0))
        shares.append(mask.mean())
    assert (
        min(shares) < 0.1
        and max(shares) == 1.0
        and any(
            not np.array_equal(training_mask(sample_scene(s), 0), training_mask(sample_scene(s), 1)) for s in range(5)
        )
    )
