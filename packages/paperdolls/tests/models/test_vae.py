"""The autoencoder's trainer: losses by hand, runs that resume and ship with their card."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from guardpaint.train.engine import Run
from paperdolls.models.vae import (
    TEST_SEEDS,
    Lesson,
    VaeConfig,
    build,
    hard_scene,
    lesson,
    psnr,
    reconstruction,
    run,
    salience,
    scenes,
)
from paperdolls.render import render
from paperdolls.scene import sample_scene

SMALL = VaeConfig(channels=(8, 8, 16))


def test_vae_batches_depend_on_the_step_alone():
    assert torch.equal(scenes(5, 2), scenes(5, 2))
    assert not torch.equal(scenes(5, 1), scenes(6, 1))
    assert scenes(TEST_SEEDS, 2).shape == (2, 3, 64, 64) and scenes(TEST_SEEDS, 2).abs().max() <= 1


def test_vae_losses_by_hand():
    """A decoder that returns zeros on a picture of ones: L1 = 1, MSE = 1, no edges: loss = 2 + 1e-4·KL."""
    vae = build(SMALL, 0)
    nn.init.zeros_(vae.decoder.conv_out.weight)
    nn.init.zeros_(vae.decoder.conv_out.bias)
    out = reconstruction(vae, Lesson(torch.ones(1, 3, 64, 64)), SMALL, torch.Generator().manual_seed(0))
    assert out["mse"].item() == pytest.approx(1.0)
    assert out["loss"].item() == pytest.approx(2.0 + 1e-4 * out["kl"].item(), abs=1e-5)


def test_vae_trains_resumes_and_ships_with_its_card(tmp_path):
    config = tmp_path / "vae.yaml"
    config.write_text(
        "model: {latent_channels: 4, channels: [8, 8, 16]}\n"
        "train: {steps: 3, batch_size: 2, learning_rate: 0.001, warmup: 1, seed: 1}\n"
    )
    run(Run(config, tmp_path / "run", minutes=0.0))
    assert not (tmp_path / "run" / "model").exists(), "not finished yet"
    run(Run(config, tmp_path / "run"))
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(tmp_path / "run" / "model").float()
    assert psnr(vae, scenes(TEST_SEEDS, 2)).shape == (2,)
    card = json.loads((tmp_path / "run" / "model" / "card.json").read_text())
    assert card["steps"] == 3 and card["metrics"]["psnr"]["n"] == 500 and card["seed"] == 1
    assert vae.config.scaling_factor > 0


def test_the_label_of_a_hard_scene_hangs_on_a_faint_colour_or_on_few_pixels():
    """Garments take the colour closest to the skin: white on the lightest, pink, orange, … black on the darkest."""
    scenes = [hard_scene(seed) for seed in range(40)]
    worn = {(f.skin, f.colour) for s in scenes for f in s.figures if s.kind != "blade" and f.kind == "person"}
    assert {(0, "white"), (1, "pink"), (5, "black")} <= worn and len(worn) == 6
    assert [s.kind for s in scenes[:4]] == ["ordinary", "swimwear", "blade", "ordinary"]


def test_a_lesson_ends_with_hard_scenes_and_knows_where_figures_are():
    batch = lesson(100, 4, VaeConfig(figures=2.0, hard=0.25, size=128))
    assert batch.images.shape == (4, 3, 128, 128) and batch.places.shape == (4, 1, 128, 128)
    assert torch.equal(batch.images[0], scenes(100, 1, 128)[0])
    last = torch.from_numpy(render(hard_scene(103), 128).image).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(batch.images[3], last, atol=1e-6)
    plain = lesson(100, 2, VaeConfig())
    assert plain.places is None and torch.equal(plain.images, scenes(100, 2))
    assert 0 < batch.places[0].mean() < 0.6 and sample_scene(100).figures


def test_figures_weigh_more_however_little_they_stand_out():
    """On a plain picture nothing stands out: with weight 1 + 3 on a quarter of it, the mean is 1.75."""
    places = torch.zeros(1, 1, 8, 8)
    places[..., :4, :4] = 1
    weight = salience(torch.zeros(1, 3, 8, 8), 4.0, 3.0 * places)
    assert weight[0, 0, 0, 0].item() == pytest.approx(4 / 1.75) and weight[0, 0, 7, 7].item() == pytest.approx(1 / 1.75)
