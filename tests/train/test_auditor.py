"""The auditor's trainer: batches, artefacts, F's calibration, a run that ends early, two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from guardpaint.audit.model import AuditorScorer
from guardpaint.data import views
from guardpaint.data.lessons import CorpusLessons, LessonSettings
from guardpaint.data.views import Labelled
from guardpaint.errors import BadConfig, BadInput
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.testing import small
from guardpaint.train import auditor as trainer
from guardpaint.train import auditor_pictures
from guardpaint.train.engine import TrainConfig

SMALL = {"small": True, "sizes": [64, 96]}
NAMES = ("safe", "nudity", "violence")


def colours(count, first=0):
    """Views of a corpus in which colour tells the category: grey, red and blue noise."""
    g = torch.Generator().manual_seed(first)
    category = torch.arange(count) % 3
    tint = torch.tensor([[0.0, 0.0, 0.0], [0.5, -0.2, -0.2], [-0.2, -0.2, 0.5]])[category]
    batch = Labelled(
        images=(0.3 + 0.2 * torch.rand(count, 3, 64, 64, generator=g) + tint[:, :, None, None]).clamp(0, 1),
        masks=torch.zeros(count, 1, 1, dtype=torch.bool),
        category=category,
        seeds=list(range(first, first + count)),
        prompts=[f"{('grey', 'red', 'blue')[c]} picture {i}" for i, c in enumerate(category.tolist())],
        names=NAMES,
    )
    return replace(batch.views(batch.images, "clean"), strength=torch.where(category == 0, 0.0, 0.8))


@pytest.fixture(scope="module")
def view_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("views")
    for split, first in (("train", 0), ("validation", 1000)):
        views.store([colours(60, first)], folder / f"small-{split}.pt")
    return folder


def sampler(data, size=16, **recipe):
    config = TrainConfig(steps=1, batch_size=size, learning_rate=0.1, seed=3)
    settings = trainer.AuditorRecipe(**recipe)
    return trainer.Sampler(CorpusLessons(data, settings), settings, small.auditor(), config)


def test_batches_are_balanced_and_repeat():
    s = sampler(colours(60))
    a, b = s.batch(5), s.batch(5)
    assert torch.equal(a.images, b.images) and torch.equal(a.ids, b.ids)
    assert torch.bincount(a.targets.category).tolist() == [8, 4, 4]
    assert not torch.equal(a.images, s.batch(6).images)
    unsafe = a.targets.category != 0
    assert (a.targets.strength[unsafe] > 0).all() and (a.targets.strength[~unsafe] == 0).all()


def test_the_same_seed_still_gives_the_same_batches():
    """Batches drawn from these views of a corpus have the recorded sums and digest."""
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 3, 64, 64), generator=g).byte()
    data = replace(
        colours(24),
        images=pixels,
        noise=torch.linspace(0, 1, 24),
        texts=tuple(f"picture {i}" for i in range(24)),
    )
    batch = sampler(data).batch(5)
    assert batch.targets.category.tolist() == [0, 1, 0, 0, 1, 0, 2, 2, 1, 0, 1, 2, 0, 2, 0, 0]
    assert sha256_hex(batch.ids.numpy().tobytes())[:12] == "fe7862ae9fe6"
    assert [float(batch.images.mean()), float(batch.images.std())] == pytest.approx([0.49541438, 0.29043800], abs=1e-5)
    sums = [float(getattr(batch.targets, k).sum()) for k in ("strength", "quality", "mask", "judged", "artefact")]
    assert sums == pytest.approx([6.4, 13.2583723, 0.0, 14.0, 1168.408813], rel=1e-4)
    assert float(batch.noise.sum()) == pytest.approx(6.7826085, abs=1e-4)


def test_a_corpus_has_no_repairs_and_nothing_to_render():
    data = colours(12)
    lessons = trainer.open_lessons(data, LessonSettings())
    assert isinstance(lessons, CorpusLessons) and len(trainer.matched_repairs(small.auditor(), lessons, data, 64)) == 0
    with pytest.raises(BadConfig, match="no scenes to render"):
        CorpusLessons(data, LessonSettings(fresh=0.5))
    with pytest.raises(BadInput, match="strength of its labels"):
        CorpusLessons(replace(data, strength=None), LessonSettings()).draw(0, 4, torch.Generator())


def test_views_of_a_world_that_is_not_installed_are_named():
    """The lessons of a testbed's views come from the testbed; without it nothing knows its scenes."""
    with pytest.raises(BadInput, match="testbed 'elsewhere'"):
        trainer.open_lessons(replace(colours(12), world="elsewhere"), LessonSettings())


def test_late_views_come_up_more_often():
    data = colours(60)
    half = replace(data, progress=torch.arange(len(data)).float() % 2)
    picked = CorpusLessons(half, LessonSettings(late=2.0)).balanced.pick(400, torch.Generator().manual_seed(0))
    share = float(half.progress[picked].mean())
    assert 0.85 < share < 0.97, "1.1 against 0.1 in weight"


def test_strength_by_hand():
    """A quarter of FULL_STRENGTH: √¼ = ½; all of it or more: 1."""
    share = auditor_pictures.FULL_STRENGTH
    masks = torch.zeros(3, 100, 100)
    masks[0].view(-1)[: int(share * 2500)] = 1
    masks[1].view(-1)[: int(share * 10000)] = 1
    assert auditor_pictures.strength_of(masks).tolist() == pytest.approx([0.5, 1.0, 0.0], abs=1e-3)


def test_artefacts_have_the_strength_they_claim():
    images = torch.rand(64, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    out, quality, judged = auditor_pictures.composites(images, 0.5, torch.Generator().manual_seed(1))
    changed = (out != images).flatten(1).any(1)
    assert torch.equal(changed, quality < 1) and 15 < int(changed.sum()) < 50
    assert (judged[~changed] == 1).all() and (judged == 0).any()
    none, ones, _ = auditor_pictures.composites(images, 0.0, torch.Generator().manual_seed(1))
    assert torch.equal(none, images) and (ones == 1).all()


def test_an_artefact_nobody_sees_is_none():
    """On plain grey a blur, a shift and a foreign patch change nothing; a cast is as strong as its colour differs."""
    plain = torch.full((64, 3, 64, 64), 0.5)
    out, quality, _ = auditor_pictures.composites(plain, 1.0, torch.Generator().manual_seed(1))
    changed = (out - plain).abs().amax((1, 2, 3)) > 1e-6
    assert (quality[~changed] == 1).all() and changed.any() and not changed.all()
    for i in torch.nonzero(changed)[:, 0].tolist():
        inside = (out[i] != 0.5).any(0)
        rms = (out[i] - 0.5)[:, inside].square().mean().sqrt()
        assert quality[i] == pytest.approx(1 - min(1.0, float(rms) / 0.3), abs=0.02)


def test_macro_f1_by_hand():
    """Class 0: 1 hit, 1 wrong → 2/3; class 1: 1 hit, 1 wrong → 2/3; class 2: none → 0. Mean 4/9."""
    predicted, right = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])
    assert trainer.macro_f1(predicted, right, 3) == pytest.approx(4 / 9)


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


def test_missing_views_are_named(tmp_path):
    with pytest.raises(BadInput, match="no views of split train"):
        trainer.find_views(tmp_path, "train")
    safe = colours(12)
    safe = safe.rows(torch.nonzero(safe.category == 0)[:, 0])
    with pytest.raises(BadInput, match="no rows of nudity, violence"):
        CorpusLessons(safe, LessonSettings())


def test_bad_shapes_are_named():
    with pytest.raises(BadConfig, match="auditor shape"):
        trainer.AuditorRecipe(shape={"wings": 2}).config()


def test_two_processes_train_one_model(view_folder, tmp_path):
    """torchrun with two processes on the CPU: one run directory, one finished model."""
    config = write_config(tmp_path / "c.yaml", steps=4, validate_every=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "-m", "guardpaint.cli", "train", "stage", "auditor",
               "--config", str(config), "--set", f"views={view_folder}", "--out", str(tmp_path / "run")]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert process.returncode == 0, process.stderr[-2000:]
    assert len((tmp_path / "run/loss.csv").read_text().splitlines()) == 5
    AuditorScorer.from_pretrained(tmp_path / "run/model")


def test_class_weights_are_taken_out_of_the_probabilities():
    """Logits (0, ln 5, ln 2) with weights 1/5/2 are even odds: a third each; without them 1/8, 5/8, 2/8."""
    net = small.auditor()
    logits = torch.tensor([[1.0, 5.0, 2.0]]).log()
    assert torch.allclose(net.probabilities(logits), torch.tensor([[1, 5, 2]]) / 8)
    net.config = replace(net.config, class_weights=(1.0, 5.0, 2.0))
    assert torch.allclose(net.probabilities(logits), torch.full((1, 3), 1 / 3))
    with pytest.raises(BadConfig, match="one above 0 for each of safe, nudity, violence"):
        replace(net.config, class_weights=(1.0, 5.0))
