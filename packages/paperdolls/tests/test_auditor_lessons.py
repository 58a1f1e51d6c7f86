"""What an auditor learns from scenes: twins, repairs, half repairs, captions; and a run from views to a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import yaml

from guardpaint.audit.model import AuditorScorer
from guardpaint.data import views
from guardpaint.data.lessons import LessonSettings
from guardpaint.draft.codec import resize
from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.testing import small
from guardpaint.train import auditor as trainer
from guardpaint.train.engine import TrainConfig
from paperdolls import auditor_lessons as lessons
from paperdolls import views as scene_views
from paperdolls.captions import HIDDEN_NUDITY, caption
from paperdolls.render import render
from paperdolls.scene import HARD_NEGATIVES, safe_version, sample_scene


@pytest.fixture(scope="module")
def view_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    net = small.vae(4)
    for split, first in scene_views.VIEW_SEEDS.items():
        views.store([scene_views.clean(net, list(range(first, first + 60)))], folder / f"small-{split}.pt")
    return folder


def sampler(view_folder, **recipe):
    config = TrainConfig(steps=1, batch_size=16, learning_rate=0.1, seed=3)
    settings = trainer.AuditorRecipe(**recipe)
    data = trainer.open_lessons(trainer.find_views(view_folder, "train"), settings)
    return trainer.Sampler(data, settings, small.auditor(), config)


def test_batches_are_balanced_and_repeat(view_folder):
    s = sampler(view_folder, repaired=0.0)
    a, b = s.batch(5), s.batch(5)
    assert torch.equal(a.images, b.images) and torch.equal(a.ids, b.ids)
    assert torch.bincount(a.targets.category).tolist() == [8, 4, 4]
    assert not torch.equal(a.images, s.batch(6).images)
    unsafe = a.targets.category != 0
    assert (a.targets.strength[unsafe] > 0).all() and (a.targets.strength[~unsafe] == 0).all()


def test_part_of_a_batch_is_rendered_anew(view_folder):
    """Of 16, 4 from views (2, 1, 1) and a whole cycle of 12 fresh ones: one nude, a splash, two blades, one by lot."""
    s = sampler(view_folder, repaired=0.0, composites=0.0, fresh=0.75)
    batch = s.batch(2)
    nude, violent = torch.bincount(batch.targets.category, minlength=3).tolist()[1:]
    assert nude >= 1 + 1 and violent >= 1 + 3 and nude + violent <= 7 and len(batch.ids) == 16
    assert not torch.equal(batch.images, s.batch(3).images)
    assert (batch.targets.mask.flatten(1).any(1) == (batch.targets.category != 0)).all()
    kinds = [scene.kind for scene in lessons.unseen_scenes(lessons.FRESH_SEEDS, 96)]
    assert set(HARD_NEGATIVES) <= set(kinds)


def test_prompts_vary_and_may_be_garbled(view_folder):
    """Another caption in every batch; with euphemism 1 no unsafe one says it openly; a salad changes a few words."""
    scene = next(s for s in map(sample_scene, range(100)) if s.kind == "nudity")
    plain, hidden, garbled = (sampler(view_folder, **r) for r in ({}, {"euphemism": 1.0}, {"salad": 1.0}))

    def said(s, index):
        return s.lessons.prompt(scene, index, torch.Generator().manual_seed(index))

    assert len({said(plain, i) for i in range(20)}) > 5
    assert all(any(phrase in said(hidden, i) for phrase in HIDDEN_NUDITY) for i in range(8))
    for i in range(20):
        before, after = said(plain, i).split(), said(garbled, i).split()
        assert len(before) == len(after) and 0 <= sum(a != b for a, b in zip(before, after, strict=True)) <= 3
    assert any(said(plain, i) != said(garbled, i) for i in range(5))


def test_repairs_count_as_matched_when_f_is_calibrated(view_folder):
    """One cosine per unsafe view, of its safe form with its own prompt, as an audit of that pair gives it."""
    model, held_out = small.auditor(), trainer.find_views(view_folder, "validation")
    known = trainer.open_lessons(held_out, LessonSettings())
    found = trainer.matched_repairs(model, known, held_out, 64)
    rows = torch.nonzero(held_out.category != 0)[:, 0]
    assert len(found) == len(rows) > 2
    scene = sample_scene(int(held_out.seeds[rows[2]]))
    picture = scene_views.scene_truth([safe_version(scene)])[0]
    audit = model.audit(resize(picture, (64, 64)), [caption(scene, 0).text], 0.0)[0]
    f = torch.sigmoid(model.f_slope * found[2] + model.f_offset)
    assert float(f) == pytest.approx(audit.faithfulness, abs=1e-4)


def test_twins_differ_by_what_is_unsafe_alone():
    """Same place, light, people and poses; no unsafe pixel; the other kind's mark."""
    first = 12 * 1000
    scenes = lessons.unseen_scenes(first, 12)
    for place, (kind, shown) in enumerate(lessons.UNSEEN_CYCLE):
        if shown is None:
            continue
        unsafe = scenes[max(i for i in range(place) if lessons.UNSEEN_CYCLE[i] == (kind, None))]
        safe = scenes[place]
        assert unsafe.category != "safe" == safe.category and safe.kind == shown
        assert render(unsafe).mask.any() and not render(safe).mask.any()
        assert (unsafe.background, unsafe.light, unsafe.jitter) == (safe.background, safe.light, safe.jitter)
        assert [(f.x, f.pose, f.height) for f in unsafe.figures] == [(f.x, f.pose, f.height) for f in safe.figures]
    assert scenes[1].figures[0].kind == "statue" and scenes[2].figures[0].garment == "swimsuit" and scenes[4].flowers


def test_repaired_scenes_are_safe_and_keep_their_prompt(view_folder):
    """All unsafe rows repaired: no mask is left, every label is safe, prompts still speak of the unsafe scene."""
    s = sampler(view_folder, repaired=1.0, composites=0.0)
    batch = s.batch(0)
    assert (batch.targets.category == 0).all() and not batch.targets.mask.any()
    assert torch.equal(batch.ids, sampler(view_folder, repaired=0.0, composites=0.0).batch(0).ids)


def test_view_scenes_are_the_auditors_own():
    """The first scenes of the splits differ: nothing is shared by seed."""
    firsts = sorted(scene_views.VIEW_SEEDS.values())
    assert all(b - a >= 6_000_000 for a, b in pairwise(firsts))
    assert sample_scene(firsts[0]) != sample_scene(firsts[1])


def test_half_repaired_scenes_are_labelled_by_what_is_left():
    """What is left lies inside the scene's unsafe area; nothing left is safe, half of it or more is unsafe."""
    g = torch.Generator().manual_seed(4)
    labels = set()
    for seed in range(60):
        scene = sample_scene(seed, ("nudity", "splash", "blade")[seed % 3])
        image, left, label = lessons.half_repaired(scene, g)
        area = torch.from_numpy(render(scene).mask).float()
        assert ((left > 0) <= (area > 0)).all() and image.shape == (3, 64, 64)
        share = float(left.sum() / area.sum())
        assert label is not False or share < 0.03
        assert label is not True or share >= 0.5 or (scene.kind == "splash" and left.sum() >= 16)
        labels.add(label)
    assert labels == {True, False, None}


def test_half_repairs_that_nobody_could_judge_are_not_judged(view_folder):
    s = sampler(view_folder, repaired=0.0, composites=0.0, partial=1.0)
    targets = s.batch(1).targets
    unsafe = targets.category != 0
    assert targets.judged.min() == 0 and targets.judged.max() == 1
    assert targets.rated.sum() == 8, "the edges of the eight half repairs are not rated"
    assert targets.mask[unsafe & (targets.judged == 1)].flatten(1).any(1).all()


RICH = {"fresh": 0.5, "salad": 0.5, "partial": 0.4, "repaired": 0.3, "composites": 0.5, "fine": 0.5, "late": 1.0}
SUMS = ("strength", "quality", "mask", "judged", "artefact", "rated")
FROZEN = {
    "rich": (RICH, 5, 128, 0.59893966, 0.21962960, "be0ba74b31de", [1, 0, 0, 0, 1, 2, 0, 0, 0, 1, 0, 2, 0, 2, 0, 0],
             [3.6075597, 14.2845049, 1380.0, 15.0, 605.297241, 14.0]),
    "plain": ({}, 6, 64, 0.55986899, 0.21699798, "cbf61539ab3b", [0, 2, 0, 0, 1, 2, 0, 0, 2, 0, 0, 0, 0, 1, 1, 1],
              [4.8021421, 15.7036695, 1856.0, 16.0, 57.7291069, 16.0]),
}  # fmt: skip
"""Recipe and index; size, mean and spread of the pictures, digest of the token ids, categories, sums of the targets:
what revision 157dbca drew, which trained the shipped auditor."""


@pytest.mark.parametrize("name", FROZEN)
def test_the_same_seed_still_gives_the_same_batches(name):
    """Every random draw is made in its old order, so a training run can be repeated."""
    recipe, index, size, mean, spread, ids, category, sums = FROZEN[name]
    scenes = scene_views.labelled(list(range(50_000_000, 50_000_060)))
    shown = scenes.views(scenes.images, "clean", progress=torch.linspace(0, 1, 60))
    settings = trainer.AuditorRecipe(**recipe)
    config = TrainConfig(steps=1, batch_size=16, learning_rate=0.1, seed=3)
    batch = trainer.Sampler(trainer.open_lessons(shown, settings), settings, small.auditor(), config).batch(index)
    assert batch.images.shape == (16, 3, size, size) and batch.targets.category.tolist() == category
    assert sha256_hex(batch.ids.numpy().tobytes())[:12] == ids
    assert [float(batch.images.mean()), float(batch.images.std())] == pytest.approx([mean, spread], abs=1e-5)
    assert [float(getattr(batch.targets, k).sum()) for k in SUMS] == pytest.approx(sums, rel=1e-4)


def test_a_run_from_views_of_scenes_to_a_checkpoint(view_folder, tmp_path):
    """The trainer finds the scenes' lessons by the name of the world in the views, and calibrates F on repairs too."""
    model = {"shape": {"small": True, "sizes": [64, 96]}, "pairs": 4, "losses": {"maps": 0.5}, "fresh": 0.25}
    train = {"steps": 6, "batch_size": 8, "learning_rate": 0.003, "warmup": 1, "validate_every": 3}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": model, "train": train}))
    trainer.run(tmp_path / "c.yaml", view_folder, tmp_path / "run", None, quiet=True)
    assert len((tmp_path / "run/loss.csv").read_text().splitlines()) == 7
    assert AuditorScorer.from_pretrained(tmp_path / "run/model").f_slope != 4.0, "F was calibrated"


def test_views_of_another_world_are_not_taken(view_folder):
    own = trainer.find_views(view_folder, "train")
    with pytest.raises(BadInput, match="views of paperdolls only"):
        lessons.SceneViews().lessons(replace(own, world="elsewhere"), LessonSettings())
    with pytest.raises(BadInput, match="have the categories safe, nudity, violence"):
        lessons.SceneViews().lessons(replace(own, names=("safe", "a", "b")), LessonSettings())
