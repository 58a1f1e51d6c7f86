"""Distilling an inpainter: ladders that keep the depth's meaning, the target by hand, a student that follows its teacher."""

from __future__ import annotations

import pytest
import torch
import yaml
from helpers import small_inpainter
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import small_pairs

from guardpaint.data.pairs import PairStore
from guardpaint.draft.loading import load_pipeline
from guardpaint.draft.schedule import level_at, sd_scheduler
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.ladder import DEPTHS, count_steps, own_ladder
from guardpaint.train import few_steps
from guardpaint.train.engine import Run, TrainConfig
from guardpaint.train.few_steps import Distiller, FewStepsConfig, implied, started
from guardpaint.train.pair_latents import encode_pairs, load_pairs
from guardpaint.types import Level

SHAPE = FewStepsConfig(rank=4, substeps=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("few")
    small_inpainter(root / "inpainter")
    pipe = load_pipeline(root / "inpainter")
    for split, count in (("train", 4), ("validation", 2)):
        small_pairs(root / "pairs", split, {"safe": 4, "nudity": count, "violence": count})
        encode_pairs(PairStore(root / "pairs"), split, pipe, Policy.default())
    return root


@pytest.fixture
def model(home):
    return Distiller(load_pipeline(home / "inpainter"), SHAPE, 1)


def batch(home, model, depth, step=0):
    pairs = load_pairs(home / "pairs", "train", model.pipe.vae)
    eps = torch.randn((2, *pairs.source.shape[1:]), generator=torch.Generator().manual_seed(3))
    return few_steps.FewStepsBatch(pairs.source[:2], pairs.mask[:2], pairs.masked[:2], pairs.ids[:2], eps, depth, step)


@settings(deadline=None)
@given(depth=st.integers(1, DEPTHS), most=st.integers(1, DEPTHS))
def test_a_depth_starts_at_its_own_level_however_few_its_steps(depth, most):
    levels = own_ladder(depth, most, lambda noise: level_at(sd_scheduler(), noise))
    noise = [level.noise for level in levels]
    assert noise[0] == pytest.approx(level_at(sd_scheduler(), depth / DEPTHS).noise)
    assert noise == sorted(noise, reverse=True)
    assert 1 <= len(levels) - 1 <= most


def test_four_evaluations_at_most_and_in_proportion():
    assert [count_steps(d, 4) for d in range(1, 11)] == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert [count_steps(d, 10) for d in range(1, 11)] == list(range(1, 11))


def test_the_implied_estimate_leads_to_the_teachers_latent():
    """By hand: from z = 1 at (0.6, 0.8) to (0.8, 0.6). With x0 = 0.5, ε = (1 − 0.3) / 0.8 = 0.875, z' = 0.925."""
    here, there = Level(0.6, 0.8, 0.5), Level(0.8, 0.6, 0.3)
    z, then = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.925]]]])
    assert implied(z, then, here, there).item() == pytest.approx(0.5)


def test_depth_ten_keeps_nothing_of_the_view():
    z0, eps, level = torch.full((1, 1, 1, 1), 9.0), torch.ones(1, 1, 1, 1), Level(0.6, 0.8, 0.5)
    assert started(z0, eps, level, 10).item() == pytest.approx(0.8)
    assert started(z0, eps, level, 9).item() == pytest.approx(0.8 + 5.4)


def test_an_untrained_student_is_the_teacher_without_guidance(home, model):
    """With guidance 1 and one substep both take the same step, so that there is nothing to learn."""
    same = Distiller(load_pipeline(home / "inpainter"), FewStepsConfig(rank=4, substeps=1, guidance=1.0), 1)
    values = same(batch(home, same, 10, 1))
    assert float(values["error"]) < 1e-8
    assert float(model(batch(home, model, 10, 1))["error"]) > 1e-4


def test_the_teacher_does_not_learn(home, model):
    """Its steps are those of the model without the LoRA, whatever the LoRA says."""
    some = batch(home, model, 8)
    here, there = model.ladder(8)[:2]
    before = model.taught(some.z0, some, here, there)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.taught(some.z0, some, here, there), before)
    assert not torch.allclose(model.walked(some, 1), model.walked(some, 0))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)


def test_batches_visit_every_step_of_every_depth(home, model):
    pairs = load_pairs(home / "pairs", "train", model.pipe.vae)
    train = TrainConfig(steps=1, batch_size=3, learning_rate=0.1, seed=2)
    seen = {(b.depth, b.step) for b in (few_steps.batch_of(pairs, k, SHAPE, train) for k in range(400))}
    assert seen == {(d, k) for d in range(1, 11) for k in range(count_steps(d, 4))}
    one, again = (few_steps.batch_of(pairs, 5, SHAPE, train) for _ in range(2))
    assert torch.equal(one.eps, again.eps) and one.depth == again.depth


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"evaluations": 11}, {"guidance": 0.5}, {"outside": 2.0}])
def test_wrong_options_are_named(wrong):
    with pytest.raises(BadConfig, match=next(iter(wrong))):
        FewStepsConfig(**wrong)


def test_training_comes_closer_to_the_teacher_and_the_adapter_repairs(home, tmp_path):
    """The run's file is what a repairer's `adapter` names, and it changes what four evaluations paint."""
    train = {"steps": 30, "batch_size": 4, "learning_rate": 0.003, "warmup": 1, "ema": 0.8, "validate_every": 30}
    (tmp_path / "few.yaml").write_text(
        yaml.safe_dump({"model": {"rank": 8, "substeps": 2, "guidance": 3.0}, "train": train})
    )
    out = tmp_path / "run"
    held_out = few_steps.Watch(load_pairs(home / "pairs", "validation", load_pipeline(home / "inpainter").vae))
    shape = FewStepsConfig(rank=8, substeps=2, guidance=3.0)
    before = held_out(Distiller(load_pipeline(home / "inpainter"), shape, 0))["score"]
    few_steps.run(Run(tmp_path / "few.yaml", out, quiet=True), str(home / "inpainter"), home / "pairs")
    card = yaml.safe_load((out / "model" / "card.json").read_text())
    assert card["steps"] == 30 and set(card["gaps"]) == {"gap_2", "gap_5", "gap_8", "gap_10"}
    assert -sum(card["gaps"].values()) / 4 > before
    adapter = {"path": str(out / "model"), "scheduler": "DDIMScheduler"}
    fast = Inpainter.from_pretrained(home / "inpainter", adapter=adapter)
    assert fast.settings.rungs == 4 and fast.settings.fixed_guidance == 1.0
