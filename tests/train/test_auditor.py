"""The auditor's trainer: batches, artefacts, F's calibration, a run that ends early, two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import yaml
from paperdolls import views as drawn
from paperdolls.captions import HIDDEN_NUDITY, caption
from paperdolls.render import render
from paperdolls.scene import HARD_NEGATIVES, sample_scene

from guardpaint.audit.model import AuditorScorer
from guardpaint.data import views
from guardpaint.errors import BadConfig, BadInput
from guardpaint.testing import small
from guardpaint.train import auditor as trainer
from guardpaint.train import auditor_pictures
from guardpaint.train.engine import TrainConfig

SMALL = {"small": True, "sizes": [64, 96]}


@pytest.fixture(scope="module")
def view_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    net = small.vae(4)
    for split, first in drawn.VIEW_SEEDS.items():
        views.store([views.clean(net, list(range(first, first + 60)))], folder / f"small-{split}.pt")
    return folder


def sampler(view_folder, **recipe):
    config = TrainConfig(steps=1, batch_size=16, learning_rate=0.1, seed=3)
    data = trainer.find_views(view_folder, "train")
    return trainer.Sampler(data, trainer.AuditorRecipe(**recipe), small.auditor(), config)


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
    kinds = [scene.kind for scene in trainer.unseen_scenes(trainer.FRESH_SEEDS, 96)]
    assert set(HARD_NEGATIVES) <= set(kinds)


def test_prompts_vary_and_may_be_garbled(view_folder):
    """Another caption in every batch; with euphemism 1 no unsafe one says it openly; a salad changes one to three words."""
    scene = next(s for s in map(sample_scene, range(100)) if s.kind == "nudity")
    plain, hidden, garbled = (sampler(view_folder, **r) for r in ({}, {"euphemism": 1.0}, {"salad": 1.0}))

    def said(s, index):
        return s.prompt(scene, index, torch.Generator().manual_seed(index))

    assert len({said(plain, i) for i in range(20)}) > 5
    assert all(any(phrase in said(hidden, i) for phrase in HIDDEN_NUDITY) for i in range(8))
    for i in range(20):
        before, after = said(plain, i).split(), said(garbled, i).split()
        assert len(before) == len(after) and 0 <= sum(a != b for a, b in zip(before, after, strict=True)) <= 3
    assert any(said(plain, i) != said(garbled, i) for i in range(5))


def test_repairs_count_as_matched_when_f_is_calibrated(view_folder):
    """One cosine per unsafe view, of its safe form with its own prompt, as an audit of that pair gives it."""
    model, held_out = small.auditor(), trainer.find_views(view_folder, "validation")
    found = trainer.matched_repairs(model, held_out, 64)
    rows = torch.nonzero(held_out.category != 0)[:, 0]
    assert len(found) == len(rows) > 2
    scene = sample_scene(int(held_out.seeds[rows[2]]))
    picture = trainer.scene_truth([trainer.safe_version(scene)])[0]
    audit = model.audit(trainer.resize(picture, (64, 64)), [caption(scene, 0).text], 0.0)[0]
    f = torch.sigmoid(model.f_slope * found[2] + model.f_offset)
    assert float(f) == pytest.approx(audit.faithfulness, abs=1e-4)


def test_twins_differ_by_what_is_unsafe_alone():
    """Same place, light, people and poses; no unsafe pixel; the other kind's mark."""
    first = 12 * 1000
    scenes = trainer.unseen_scenes(first, 12)
    for place, (kind, shown) in enumerate(auditor_pictures.UNSEEN_CYCLE):
        if shown is None:
            continue
        unsafe = scenes[max(i for i in range(place) if auditor_pictures.UNSEEN_CYCLE[i] == (kind, None))]
        safe = scenes[place]
        assert unsafe.category != "safe" == safe.category and safe.kind == shown
        assert render(unsafe).mask.any() and not render(safe).mask.any()
        assert (unsafe.background, unsafe.light, unsafe.jitter) == (safe.background, safe.light, safe.jitter)
        assert [(f.x, f.pose, f.height) for f in unsafe.figures] == [(f.x, f.pose, f.height) for f in safe.figures]
    assert scenes[1].figures[0].kind == "statue" and scenes[2].figures[0].garment == "swimsuit" and scenes[4].flowers


def test_late_views_come_up_more_often(view_folder):
    data = trainer.find_views(view_folder, "train")
    half = replace(data, progress=torch.arange(len(data)).float() % 2)
    config = TrainConfig(steps=1, batch_size=400, learning_rate=0.1, seed=3)
    picked = trainer.Sampler(half, trainer.AuditorRecipe(late=2.0), small.auditor(), config).pick(
        400, torch.Generator().manual_seed(0)
    )
    share = float(half.progress[picked].mean())
    assert 0.85 < share < 0.97, "1.1 against 0.1 in weight"


def test_repaired_scenes_are_safe_and_keep_their_prompt(view_folder):
    """All unsafe rows repaired: no mask is left, every label is safe, prompts still speak of the unsafe scene."""
    s = sampler(view_folder, repaired=1.0, composites=0.0)
    batch = s.batch(0)
    assert (batch.targets.category == 0).all() and not batch.targets.mask.any()
    assert torch.equal(batch.ids, sampler(view_folder, repaired=0.0, composites=0.0).batch(0).ids)


def test_strength_by_hand():
    """A quarter of FULL_STRENGTH: √¼ = ½; all of it or more: 1."""
    share = auditor_pictures.FULL_STRENGTH
    masks = torch.zeros(3, 100, 100)
    masks[0].view(-1)[: int(share * 2500)] = 1
    masks[1].view(-1)[: int(share * 10000)] = 1
    assert trainer.strength_of(masks).tolist() == pytest.approx([0.5, 1.0, 0.0], abs=1e-3)


def test_artefacts_have_the_strength_they_claim():
    images = torch.rand(64, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    out, quality, judged = trainer.composites(images, 0.5, torch.Generator().manual_seed(1))
    changed = (out != images).flatten(1).any(1)
    assert torch.equal(changed, quality < 1) and 15 < int(changed.sum()) < 50
    assert (judged[~changed] == 1).all() and (judged == 0).any()
    none, ones, _ = trainer.composites(images, 0.0, torch.Generator().manual_seed(1))
    assert torch.equal(none, images) and (ones == 1).all()


def test_an_artefact_nobody_sees_is_none():
    """On plain grey a blur, a shift and a foreign patch change nothing; a cast is as strong as its colour differs."""
    plain = torch.full((64, 3, 64, 64), 0.5)
    out, quality, _ = trainer.composites(plain, 1.0, torch.Generator().manual_seed(1))
    changed = (out - plain).abs().amax((1, 2, 3)) > 1e-6
    assert (quality[~changed] == 1).all() and changed.any() and not changed.all()
    for i in torch.nonzero(changed)[:, 0].tolist():
        inside = (out[i] != 0.5).any(0)
        rms = (out[i] - 0.5)[:, inside].square().mean().sqrt()
        assert quality[i] == pytest.approx(1 - min(1.0, float(rms) / 0.3), abs=0.02)


def test_macro_f1_by_hand():
    """Class 0: 1 hit, 1 wrong → 2/3; class 1: 1 hit, 1 wrong → 2/3; class 2: none → 0. Mean 4/9."""
    said, right = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
    assert trainer.macro_f1(said, right, 3) == pytest.approx(4 / 9)


def test_faithfulness_is_calibrated():
    """Matched cosines near 0.8, others near 0.2: F is above ½ for the first, below for the second."""
    model = small.auditor()
    g = torch.Generator().manual_seed(0)
    matched, others = 0.8 + 0.1 * torch.randn(200, generator=g), 0.2 + 0.1 * torch.randn(200, generator=g)
    trainer.calibrate_faithfulness(model, matched, others)
    f = lambda c: torch.sigmoid(model.f_slope * c + model.f_offset)  # noqa: E731
    assert f(torch.tensor(0.7)) > 0.9 and f(torch.tensor(0.3)) < 0.1


def write_config(path, **train):
    train = {"steps": 30, "batch_size": 8, "learning_rate": 0.003, "warmup": 1, "validate_every": 10, **train}
    path.write_text(yaml.safe_dump({"model": {"shape": SMALL, "pairs": 4, "losses": {"maps": 0.5}}, "train": train}))
    return path


def test_a_run_from_views_to_a_checkpoint(view_folder, tmp_path):
    config = write_config(tmp_path / "c.yaml")
    trainer.run(config, view_folder, tmp_path / "run", None, quiet=True)
    rows = (tmp_path / "run/loss.csv").read_text().splitlines()
    assert rows[0] == "step,norm,loss,adv,category,strength,seam,match,maps" and len(rows) == 31
    losses = [float(r.split(",")[2]) for r in rows[1:]]
    assert sum(losses[-5:]) < sum(losses[:5])
    model = AuditorScorer.from_pretrained(tmp_path / "run/model")
    assert model.f_slope != 4.0, "F was calibrated"
    card = json.loads((tmp_path / "run/model/card.json").read_text())
    assert card["best"]["step"] in (10, 20, 30) and 0 <= card["best"]["score"] <= 1


def test_training_ends_when_nothing_gets_better(view_folder, tmp_path):
    """A rate too small to learn anything: two validations after the best one, patience 2 ends the run."""
    config = write_config(
        tmp_path / "c.yaml", learning_rate=0.000000001, ema=0.0, steps=100, validate_every=2, patience=2
    )
    trainer.run(config, view_folder, tmp_path / "run", None, quiet=True)
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert json.loads((tmp_path / "run/run.json").read_text())["step"] == best["step"] + 2 * 2 < 100
    assert (tmp_path / "run/model/model.safetensors").exists()


def test_a_stopped_run_goes_on_to_the_same_weights(view_folder, tmp_path):
    config = write_config(tmp_path / "c.yaml", steps=6, validate_every=3)
    trainer.run(config, view_folder, tmp_path / "a", None, quiet=True)
    trainer.run(config, view_folder, tmp_path / "b", 0.0, quiet=True)
    assert not (tmp_path / "b/model").exists()
    trainer.run(config, view_folder, tmp_path / "b", None, quiet=True)
    one, two = (AuditorScorer.from_pretrained(tmp_path / n / "model").state_dict() for n in "ab")
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_missing_views_are_named(tmp_path, view_folder):
    with pytest.raises(BadInput, match="no views of split train"):
        trainer.find_views(tmp_path, "train")
    safe = trainer.find_views(view_folder, "train")
    safe = safe.rows(torch.nonzero(safe.category == 0)[:, 0])
    with pytest.raises(BadInput, match="nothing of nudity, violence"):
        trainer.Sampler(safe, trainer.AuditorRecipe(), small.auditor(), TrainConfig(1, 2, 0.1))


def test_bad_shapes_are_named():
    with pytest.raises(BadConfig, match="auditor shape"):
        trainer.AuditorRecipe(shape={"wings": 2}).config()


def test_two_processes_train_one_model(view_folder, tmp_path):
    """accelerate launch with two CPU processes: one run directory, one finished model."""
    config = write_config(tmp_path / "c.yaml", steps=4, validate_every=2)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
               "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "guardpaint.cli", "train", "auditor",
               "--config", str(config), "--views", str(view_folder), "--out", str(tmp_path / "run")]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len((tmp_path / "run/loss.csv").read_text().splitlines()) == 5
    AuditorScorer.from_pretrained(tmp_path / "run/model")


def test_view_scenes_are_the_auditors_own():
    """The first scenes of the splits differ: nothing is shared by seed."""
    firsts = sorted(drawn.VIEW_SEEDS.values())
    assert all(b - a >= 6_000_000 for a, b in pairwise(firsts))
    assert sample_scene(firsts[0]) != sample_scene(firsts[1])


def test_half_repaired_scenes_are_labelled_by_what_is_left():
    """What is left lies inside the scene's unsafe area; nothing left is safe, half of it or more is unsafe."""
    g = torch.Generator().manual_seed(4)
    labels = set()
    for seed in range(60):
        scene = sample_scene(seed, ("nudity", "splash", "blade")[seed % 3])
        image, left, label = trainer.half_repaired(scene, g)
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


def test_class_weights_are_taken_out_of_the_probabilities():
    """Logits (0, ln 5, ln 2) with weights 1/5/2 are even odds: a third each; without them 1/8, 5/8, 2/8."""
    net = small.auditor()
    logits = torch.tensor([[1.0, 5.0, 2.0]]).log()
    assert torch.allclose(net.probabilities(logits), torch.tensor([[1, 5, 2]]) / 8)
    net.config = replace(net.config, class_weights=(1.0, 5.0, 2.0))
    assert torch.allclose(net.probabilities(logits), torch.full((1, 3), 1 / 3))
    with pytest.raises(BadConfig, match="one above 0 for each of safe, nudity, violence"):
        replace(net.config, class_weights=(1.0, 5.0))
