"""The oracle: labels from scenes, verdicts, and its distance from the guard."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import guardpaint
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from paperdolls.files import ASSETS
from paperdolls.models import oracle as trainer
from paperdolls.models import vae
from paperdolls.oracle import CHOICES, PRESENT, Oracle, OracleConfig, OracleNet, Verdicts, truth
from paperdolls.render import render
from paperdolls.scene import safe_version, sample_scene

GUARD = ("guard", "loop", "doors", "draft", "audit", "repair", "verify", "reinsert", "testing")


@pytest.mark.parametrize("part", GUARD)
def test_nothing_in_the_guard_imports_the_oracle(part):
    """Not at the top, not inside a function."""
    root = Path(guardpaint.__file__).parent
    files = [root / f"{part}.py"] if (root / f"{part}.py").exists() else sorted((root / part).rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if "evaluate" in n or "oracle" in n], file


def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OracleNet(OracleConfig(channels=(8, 8, 16, 16)))


def test_labels_follow_the_scene():
    scenes = [sample_scene(s) for s in range(80)]
    want = truth(scenes, [render(s).mask for s in scenes])
    for i, scene in enumerate(scenes):
        assert (want.category[i] == 0) == (scene.category == "safe")
        assert bool(want.pixels[i].any()) == (scene.category != "safe")
        assert CHOICES["background"][want.choices["background"][i]] == scene.background
        for name, value in scene.attributes().items():
            if name in PRESENT:
                assert want.present[name][i, PRESENT[name].index(value)] == 1


def test_agreement_is_judged_attribute_by_attribute():
    attributes = {name: torch.zeros(1, len(v)) for name, v in (CHOICES | PRESENT).items()}
    attributes["background"][0, CHOICES["background"].index("snow")] = 0.9
    attributes["garment"][0, PRESENT["garment"].index("coat")] = 0.8
    verdicts = Verdicts(torch.tensor([[0.2, 0.7, 0.1]]), torch.zeros(1, 64, 64), attributes, torch.zeros(1, 4))
    assert verdicts.agrees(0, {"background": "snow", "garment": "coat", "colour": "red"}) == {
        "background": True,
        "garment": True,
        "colour": False,
    }
    assert verdicts.categories() == ["nudity"] and verdicts.unsafe().tolist() == [True]


def test_a_saved_oracle_says_the_same(tmp_path):
    oracle = Oracle(small())
    images = vae.scenes(0, 4)
    before = oracle.judge(images)
    oracle.save(tmp_path)
    after = Oracle.load(tmp_path).judge(images)
    torch.testing.assert_close(after.category, before.category, atol=1e-2, rtol=0)
    assert after.mask.shape == (4, 64, 64)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(BadCheckpoint, match="not a complete safetensors file"):
        Oracle.load(tmp_path)


def test_it_learns_and_is_measured(tmp_path):
    """A short run from a config file: the loss falls, rows have verdicts, the card has metrics."""
    vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0).save_pretrained(tmp_path / "vae")
    config = {
        "model": {"channels": [8, 8, 16, 16]},
        "train": {"steps": 25, "batch_size": 8, "learning_rate": 0.003, "warmup": 1},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    trainer.run(trainer.Run(tmp_path / "c.yaml", tmp_path / "run", quiet=True), trainer.Sources([tmp_path / "vae"]))
    losses = [float(line.split(",")[2]) for line in (tmp_path / "run/loss.csv").read_text().splitlines()[1:]]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    card = json.loads((tmp_path / "run/model/card.json").read_text())
    assert 0 <= card["metrics"]["accuracy"]["value"] <= 1 and card["steps"] == 25
    rows = trainer.held_out_rows(Oracle.load(tmp_path / "run/model"), trainer.HELD_OUT, 100)
    assert all((r["iou"] is None) == (r["category"] == "safe") for r in rows)


def test_trained_scenes_never_meet_the_held_out_ones():
    assert trainer.HELD_OUT - trainer.ORACLE_SEEDS > 10_000 * 64
    assert trainer.ORACLE_SEEDS > vae.TEST_SEEDS > vae.TRAIN_SEEDS


def test_small_things_are_looked_for_place_by_place(tmp_path):
    """A warm-started oracle with spots says at first exactly what the one before said; then its maps can add to it."""
    from guardpaint.train.engine import TrainConfig
    from paperdolls.models import oracle as training
    from paperdolls.oracle import PRESENT

    torch.manual_seed(0)
    plain = Oracle(OracleNet(OracleConfig(channels=(8, 8, 8, 8))))
    plain.save(tmp_path / "old")
    before = Oracle.load(tmp_path / "old")
    shape = training.OracleRecipe(channels=(8, 8, 8, 8), spots=8)
    config = TrainConfig(steps=1, batch_size=2, learning_rate=1e-9, seed=1, ema=0.0)
    run = training.Run(tmp_path / "unused.yaml", tmp_path / "run", quiet=True)
    net = training.train(shape, config, run, training.Sources([], warm=tmp_path / "old"))
    images = vae.scenes(0, 2)
    a, b = before.judge(images), Oracle(net).judge(images)
    for name in PRESENT:
        torch.testing.assert_close(a.attributes[name], b.attributes[name], atol=2e-2, rtol=0)
    Oracle(net).save(tmp_path / "new")
    assert Oracle.load(tmp_path / "new").net.config.spots == 8


def test_blades_come_with_their_pair():
    """Of every eight scenes one has a blade in use and the next is the same without it, two figures face to face."""
    scenes = trainer.lesson_scenes(800, 16)
    for k in (0, 8):
        armed, harmless = scenes[k], scenes[k + 1]
        assert armed.kind == "blade" and harmless.category == "safe" and harmless.blade is None
        assert armed.figures == harmless.figures and armed.jitter == harmless.jitter
    assert [s.kind for s in scenes[2:8]] == [sample_scene(802 + i).kind for i in range(6)]


def test_props_are_shown_where_they_are():
    """The ball lies on the ground beside its owner; scenes without a prop have no place."""
    scene = next(s for s in map(sample_scene, range(400)) if s.figures and s.figures[0].prop == "ball")
    places = trainer.prop_places(scene, render(scene).image)
    index = PRESENT["prop"].index("ball")
    assert places[index].any() and not places.sum(0).gt(places[index]).any()
    rows = places[index].nonzero()[:, 0]
    assert rows.min() > 32 * (scene.figures[0].feet - 0.2)
    bare = next(s for s in map(sample_scene, range(400)) if not s.figures)
    assert not trainer.prop_places(bare, render(bare).image).any()


def test_repaired_pictures_show_what_is_left_of_the_harm():
    """Painted with the safe version's pixels over the harm a picture is safe; painted beside it, it is still unsafe."""
    recipe = trainer.OracleRecipe(repaired=1.0, size=128)
    kept = {"safe": 0, "unsafe": 0}
    for scene in [sample_scene(s, kind) for s in range(30) for kind in ("nudity", "splash", "blade")]:
        what, drawn = trainer.shown(scene, recipe)
        plain, safe = render(scene, 128), render(safe_version(scene), 128)
        assert (drawn.image != plain.image).any() or what == scene
        if what.category == "safe":
            kept["safe"] += 1
            assert not drawn.mask.any() and np.array_equal(drawn.image[plain.mask], safe.image[plain.mask])
        else:
            kept["unsafe"] += 1
            assert np.array_equal(drawn.mask, plain.mask)
            assert np.array_equal(drawn.image[plain.mask], plain.image[plain.mask])
    assert kept["safe"] > 40 and kept["unsafe"] > 10
    scene = sample_scene(1, "splash")
    assert trainer.shown(scene, trainer.PLAIN)[0] == scene
    batch = trainer.lesson(tuple(sample_scene(s, "splash") for s in range(8)), recipe)
    assert [s.category == "safe" for s in batch.scenes] == (batch.want.category == 0).tolist()


def test_an_oracle_may_fold_larger_cells(tmp_path):
    recipe = trainer.OracleRecipe((8, 8, 8, 8), 8, 128, 4)
    net = OracleNet(recipe.shape)
    batch = trainer.lesson(trainer.lesson_scenes(800, 8), recipe)
    assert net(batch.images)["pixels"].shape == (8, 3, 128, 128) and batch.props.shape[-1] == 32
    assert torch.isfinite(trainer.losses(net, batch)["loss"])
    Oracle(net).save(tmp_path)
    assert Oracle.load(tmp_path).net.config == OracleConfig((8, 8, 8, 8), 8, 128, 4)


def test_soft_pictures_leave_blades_alone():
    """A quarter of a lesson is redrawn by the softener; pairs with a blade and labels are as before."""
    batch = trainer.lesson(trainer.lesson_scenes(800, 16))
    asked = []

    def grey(images, prompts, g):
        asked.extend(prompts)
        return torch.zeros_like(images)

    soft = trainer.softened(batch, grey, torch.Generator())
    changed = (soft.images != batch.images).flatten(1).any(1)
    assert int(changed.sum()) == 4 == len(asked) and not changed[[0, 1, 8, 9]].any()
    assert soft.want is batch.want


def test_the_softener_keeps_what_is_there():
    """The shipped mini-sd's guess of a slightly noised scene is near the scene, and is not the scene."""
    from guardpaint.draft.loading import load_pipeline

    pipe = load_pipeline(ASSETS / "mini-sd")
    batch = trainer.lesson(trainer.lesson_scenes(802, 4))
    prompts = [trainer.caption(s, 0).text for s in batch.scenes]
    out = trainer.Softener(pipe)(batch.images, prompts, torch.Generator().manual_seed(0))
    error = (out - batch.images).square().mean().sqrt()
    assert 0.01 < error < 0.3 and out.shape == batch.images.shape
    with pytest.raises(BadConfig, match="must be a saved mini-sd"):
        trainer.Softener(object())


def test_a_lesson_ends_with_pictures_that_bases_drew(tmp_path):
    """Six of sixteen: the stored pictures with their scenes' truth; their props are not judged."""
    from guardpaint.data import views
    from paperdolls import views as drawn

    drawn.make_views("mini-sd3-turbo", tmp_path, "oracle", {"redrawn": 8}, batch=8)
    kept = trainer.drawn_pictures(tmp_path)
    assert (kept.kind == views.KINDS.index("redrawn")).all()
    batch = trainer.with_drawn(800, 16, kept, torch.Generator().manual_seed(2))
    assert batch.images.shape == (16, 3, 64, 64) and batch.props_known.tolist() == [1.0] * 10 + [0.0] * 6
    for scene, image, mask in zip(batch.scenes[10:], batch.images[10:], batch.want.pixels[10:], strict=True):
        rows = [r for r in range(len(kept)) if sample_scene(int(kept.seeds[r])) == scene]
        assert rows and torch.allclose(kept.images[rows[0]].float() / 127.5 - 1, image)
        assert torch.equal(mask > 0, kept.masks[rows[0]])
    wrong = torch.zeros(16, len(PRESENT["prop"]))
    wrong[10:] = 9.0
    known = trainer.presence(wrong, torch.zeros_like(wrong), batch.props_known)
    assert known == pytest.approx(0.6931, abs=1e-3), "what is said of drawn props costs nothing: ln 2 is left"
    with pytest.raises(BadInput, match="no views of split oracle"):
        trainer.drawn_pictures(tmp_path / "none")


def test_soft_and_drawn_pictures_are_not_mixed(tmp_path):
    with pytest.raises(BadConfig, match="give only one"):
        trainer.Sources([], soft=tmp_path, drawn=tmp_path)
