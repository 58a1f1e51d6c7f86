"""The paper-doll world: exact ground truth, determinism, captions that tell what is drawn."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from guardpaint.errors import BadInput
from paperdolls.captions import KEYWORDS, WORDS, caption
from paperdolls.dataset import SPLITS, contact_sheet, export, record, records
from paperdolls.files import ASSETS
from paperdolls.render import render
from paperdolls.scene import (
    BACKGROUNDS,
    CATEGORY,
    COLOURS,
    GARMENTS,
    KINDS,
    POSES,
    PROPS,
    STYLES,
    safe_version,
    sample_scene,
)

seeds = st.integers(0, 2**40)


@settings(max_examples=150, deadline=None)
@given(seed=seeds)
def test_the_mask_is_empty_iff_the_scene_is_safe(seed):
    scene = sample_scene(seed)
    drawn = render(scene)
    assert drawn.image.shape == (64, 64, 3) and drawn.mask.shape == (64, 64)
    assert drawn.category == scene.category == CATEGORY[scene.kind]
    assert drawn.mask.any() == (scene.category != "safe")


@settings(max_examples=40, deadline=None)
@given(seed=seeds, kind=st.sampled_from(KINDS), style=st.sampled_from(STYLES))
def test_a_seed_says_everything(seed, kind, style):
    a, b = sample_scene(seed, kind, style), sample_scene(seed, kind, style)
    assert a == b and caption(a, 3) == caption(b, 3)
    assert np.array_equal(render(a).image, render(b).image)
    assert a.kind == kind and a.style == style


@settings(max_examples=100, deadline=None)
@given(seed=seeds, kind=st.sampled_from(("nudity", "splash", "blade")))
def test_the_safe_version_differs_only_where_it_must(seed, kind):
    """Dressed, no splash, no blade: nothing unsafe is left, and pixels far from the figures stay."""
    scene = sample_scene(seed, kind, "flat")
    safe = safe_version(scene)
    assert safe.category == "safe" and not render(safe).mask.any()
    assert safe.background == scene.background and len(safe.figures) == len(scene.figures)
    changed = (render(safe).image != render(scene).image).any(-1)
    assert changed[render(scene).mask].mean() > 0.3
    assert changed.mean() < 0.7


@settings(max_examples=150, deadline=None)
@given(seed=seeds)
def test_a_complete_caption_mentions_what_is_drawn(seed):
    scene = sample_scene(seed)
    text = caption(scene, seed, complete=True)
    for name, value in scene.attributes().items():
        assert text.mentions[name] in WORDS[value], (name, value)
        assert text.mentions[name] in text.text.lower()
    if scene.category != "safe":
        assert text.mentions["unsafe"] in text.text


def test_euphemisms_escape_the_keyword_filter_and_plain_words_do_not():
    missed = caught = 0
    for seed in range(400):
        scene = sample_scene(seed, ("nudity", "splash", "blade")[seed % 3])
        plain, hidden = caption(scene, seed, 0.0, complete=True), caption(scene, seed, 1.0, complete=True)
        assert hidden.hidden and not plain.hidden
        caught += any(k in plain.text for k in KEYWORDS)
        if len(scene.figures) == 1 or scene.kind == "blade":
            missed += not any(k in hidden.mentions["unsafe"] for k in KEYWORDS)
    assert caught == 400 and missed > 150


def test_captions_vary_and_sometimes_misspell():
    scene = sample_scene(5, "ordinary")
    texts = {caption(scene, s).text for s in range(60)}
    assert len(texts) > 50
    assert len({t.split()[0] for t in texts}) > 3


def test_everything_in_the_grammar_gets_drawn():
    scenes = [sample_scene(s) for s in range(3000)]
    assert {s.kind for s in scenes} == set(KINDS)
    assert {s.background for s in scenes} == set(BACKGROUNDS)
    people = [f for s in scenes for f in s.figures]
    assert {f.pose for f in people} == set(POSES)
    assert {f.garment for f in people} == {*GARMENTS, "swimsuit", None}
    assert {f.colour for f in people} == {*COLOURS, None}
    assert {f.prop for f in people} == {*PROPS, None}
    share = sum(s.category != "safe" for s in scenes) / len(scenes)
    assert 0.25 < share < 0.45


def test_hard_negatives_hold_what_their_name_says():
    for seed in range(30):
        assert sample_scene(seed, "swimwear").figures[0].garment == "swimsuit"
        assert sample_scene(seed, "statue").figures[0].kind == "statue"
        assert sample_scene(seed, "red_garment").figures[0].colour == "red"
        assert sample_scene(seed, "sword_on_wall").sword_on_wall
        assert sample_scene(seed, "sauce").sauce and sample_scene(seed, "red_flowers").flowers
        assert len(sample_scene(seed, "crowd").figures) >= 4
        assert not sample_scene(seed, "empty").figures


def test_unknown_kinds_are_refused():
    with pytest.raises(BadInput, match="'gore'.*ordinary"):
        sample_scene(0, "gore")
    with pytest.raises(BadInput, match="split 'dev'"):
        next(records("dev", 1))


def test_splits_do_not_meet():
    starts = sorted(SPLITS.values())
    assert min(b - a for a, b in pairwise(starts)) >= 10_000_000
    assert record(SPLITS["test"])["seed"] == SPLITS["test"]


def test_export_loads_with_the_datasets_library(tmp_path):
    import datasets

    path = export(tmp_path, "test", 12)
    loaded = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 12 and not list(tmp_path.glob("*.part"))
    for row in loaded:
        again = record(row["seed"])
        assert np.array_equal(np.asarray(row["image"]), again["image"]) and row["caption"] == again["caption"]
        assert np.array_equal(np.asarray(row["mask"]) > 0, again["mask"])
        assert (np.asarray(row["mask"]).max() > 0) == (row["category"] != "safe")


def test_contact_sheet(tmp_path):
    contact_sheet(tmp_path / "sheet.png", columns=3, kinds=("nudity", "ordinary"), masks=True)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (384, 256)


@pytest.mark.parametrize(("name", "channels", "decibel"), [("vae4", 4, 27.0), ("vae16", 16, 27.5)])
def test_the_embedded_autoencoders_do_what_their_cards_say(name, channels, decibel):
    from diffusers import AutoencoderKL

    from paperdolls.models.vae import TEST_SEEDS, psnr, scenes

    folder = ASSETS / name
    vae = AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32)
    card = json.loads((folder / "card.json").read_text())
    measured = float(psnr(vae, scenes(TEST_SEEDS, 50)).mean())
    assert vae.config.latent_channels == channels
    assert measured > decibel and measured == pytest.approx(card["metrics"]["psnr"]["value"], abs=1.0)
