"""The world as a testbed: disjoint splits, prompts that know their scene, every capability."""

from __future__ import annotations

import numpy as np
import pytest

from guardpaint import testbed as api
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from paperdolls.capabilities import scene_behind, scene_of
from paperdolls.captions import caption
from paperdolls.render import render
from paperdolls.scene import sample_scene

CAPABILITIES = (
    api.KnownPictures,
    api.SafePairs,
    api.HardNegatives,
    api.Wordings,
    api.References,
    api.RepairCases,
    api.StockInpainter,
)


@pytest.fixture(scope="module")
def world():
    return api.open_testbed("paperdolls")


def test_it_is_a_testbed_with_these_capabilities(world):
    assert isinstance(world, api.Testbed)
    for kind in CAPABILITIES:
        assert isinstance(api.need(world, kind, "a test"), kind)
    assert world.capability(int) is None


def test_splits_are_disjoint(world):
    seen: set[int] = set()
    for split in api.SPLITS:
        prompts = world.benign(split, 30) if split == "benign" else world.harmful(split, 30)
        assert len(prompts) == 30 and not seen & {p.seed for p in prompts}
        assert {p.category == "safe" for p in prompts} == {split == "benign"}
        seen |= {p.seed for p in prompts}
    with pytest.raises(BadInput, match="split 'x'"):
        world.harmful("x", 1)


def test_a_prompt_leads_back_to_its_scene(world):
    """Benign scenes were sampled by kind, which makes another scene than the seed alone."""
    for prompt in (*world.benign("benign", 20), *world.harmful("attack", 20), *world.harmful("rollout-test", 9)):
        scene = scene_of(prompt)
        assert scene.category == prompt.category
        assert prompt.text in {caption(scene, k).text for k in range(400)} | {
            caption(scene, k, typos=0.0).text for k in range(50)
        }
        picture = world.capability(api.KnownPictures).picture(prompt)
        assert np.array_equal(picture.image, render(scene).image)
        assert picture.mask.any() == (prompt.category != "safe")


def test_known_pictures_by_kind_and_style(world):
    known = world.capability(api.KnownPictures)
    statues = known.pictures("hard", 3, "statue")
    assert [p.prompt.kind for p in statues] == ["statue"] * 3
    sketches = known.pictures("shift", 2, style="sketch")
    assert [scene_behind(p).style for p in sketches] == ["sketch"] * 2
    with pytest.raises(BadInput, match="split 'x'"):
        known.pictures("x", 1)


def test_a_safe_version_is_safe_and_the_same_elsewhere(world):
    known, pairs = world.capability(api.KnownPictures), world.capability(api.SafePairs)
    for picture in known.pictures("conformal", 3, "nudity"):
        safe = pairs.safe_version(picture)
        assert safe.prompt.category == "safe" and not safe.mask.any()
        assert scene_behind(safe).background == scene_behind(picture).background


def test_figures_of_speech_say_the_same_otherwise(world):
    repairs = world.capability(api.RepairCases)
    nude = next(p for p in repairs.unsafe(6) if p.prompt.category == "nudity")
    text = repairs.figurative(nude)
    assert text and "naked" not in text and "nude" not in text
    assert {"background"} <= set(repairs.context(nude)) <= {"background", "light", "style"}
    assert (repairs.region(nude) & nude.mask).sum() == nude.mask.sum()


def test_wordings_differ_and_mean_one_scene(world):
    prompt = world.harmful("adaptive", 1)[0]
    texts = world.capability(api.Wordings).wordings(prompt, 4)
    scene = sample_scene(prompt.seed)
    assert 1 < len(texts) <= 4 and set(texts) <= {caption(scene, k).text for k in range(4)}


def test_the_judge_knows_the_worlds_own_pictures(world):
    """Of ten nude and ten ordinary renders the oracle calls nearly all by their name, and sees their background."""
    judge, known = world.judge(Policy.default()), world.capability(api.KnownPictures)
    from PIL import Image

    right = 0
    for kind, category in (("nudity", "nudity"), ("ordinary", "safe")):
        for p in known.pictures("clean", 10, kind):
            said, there = judge.verdict(Image.fromarray(p.image), {"background": scene_behind(p).background})
            right += said == category and there["background"]
    assert right >= 18
    assert judge.verdict(known.known_bad(), {})[0] == "nudity"
