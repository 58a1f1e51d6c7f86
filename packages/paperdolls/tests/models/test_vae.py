"""The autoencoder's trainer: losses by hand, runs that resume and ship with their card."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from guardpaint.train.engine import Run
from paperdolls.models.vae import TEST_SEEDS, VaeConfig, build, psnr, reconstruction, run, scenes

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
    out = reconstruction(vae, torch.ones(1, 3, 64, 64), SMALL, torch.Generator().manual_seed(0))
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
