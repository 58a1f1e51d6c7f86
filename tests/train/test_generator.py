"""The UNet generator's trainer: its loss by hand, and a run from scenes to a loadable pipeline."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from guardpaint.train import generator, vae
from guardpaint.train.engine import TrainConfig
from guardpaint.train.latents import SceneLatents, encode_scenes
from guardpaint.world.tokenizer import train_tokenizer, world_captions


def test_min_snr_by_hand():
    """ᾱ = 0.9: SNR 9 → 5/9; ᾱ = 0.5: SNR 1 → 1."""
    w = generator.min_snr_weight(torch.tensor([0.9, 0.5]), 5.0)
    torch.testing.assert_close(w, torch.tensor([5 / 9, 1.0]))


def test_loss_by_hand():
    """A model that predicts 0 against ε = 2 at SNR 9: error 4, weighted 20/9."""

    class Zero(nn.Module):
        def forward(self, z, t, ids):
            return torch.zeros_like(z)

    batch = (
        torch.zeros(1, 4, 2, 2),
        torch.full((1, 4, 2, 2), 2.0),
        torch.tensor([0]),
        torch.zeros(1, 3, dtype=torch.long),
    )
    out = generator.denoising_losses(Zero(), batch, torch.tensor([0.9]), 5.0)
    assert out["mse"].item() == pytest.approx(4.0) and out["loss"].item() == pytest.approx(20 / 9)


def test_batches_depend_on_seed_and_step_alone_and_drop_captions():
    data = SceneLatents(torch.randn(50, 4, 2, 2), torch.randint(5, 9, (50, 2, 3)), torch.zeros(50, dtype=torch.bool))
    shape, empty = generator.GeneratorConfig(caption_drop=0.5), torch.tensor([1, 1, 1])
    config = TrainConfig(steps=1, batch_size=40, learning_rate=1.0)
    a, b = (generator.batch_of(data, 7, config, shape, empty) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[1], generator.batch_of(data, 8, config, shape, empty)[1])
    dropped = (a[3] == 1).all(1).float().mean()
    assert 0.25 < float(dropped) < 0.75


def test_scenes_are_encoded_once(tmp_path):
    net = vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0).eval()
    words = train_tokenizer(world_captions(0, 50), merges=50)
    first = encode_scenes(net, words, 5, 6, 2, tmp_path / "z.pt")
    assert first.latents.shape == (6, 4, 16, 16) and first.ids.shape == (6, 2, 64) and len(first) == 6
    stamp = (tmp_path / "z.pt").stat().st_mtime_ns
    again = encode_scenes(net, words, 5, 6, 2, tmp_path / "z.pt")
    assert torch.equal(first.latents, again.latents) and (tmp_path / "z.pt").stat().st_mtime_ns == stamp
    other = encode_scenes(net, words, 6, 6, 2, tmp_path / "z.pt")
    assert torch.equal(other.latents[:5], first.latents[1:])


def test_from_scenes_to_a_pipeline(tmp_path):
    from diffusers import StableDiffusionPipeline

    net = vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0)
    net.save_pretrained(tmp_path / "vae")
    config = tmp_path / "c.yaml"
    config.write_text(
        "model: {channels: [16, 16, 16], text_width: 32, text_layers: 1, merges: 50, scenes: 40, captions: 1}\n"
        "train: {steps: 3, batch_size: 2, learning_rate: 0.001, warmup: 1, seed: 1}\n"
    )
    generator.run(config, tmp_path / "vae", tmp_path / "run", minutes=0.0, quiet=True)
    assert not (tmp_path / "run" / "model").exists()
    generator.run(config, tmp_path / "vae", tmp_path / "run", minutes=None, quiet=True)
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "run" / "model", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a person in a red coat", num_inference_steps=2, output_type="pt").images
    assert image.shape == (1, 3, 64, 64)
    card = json.loads((tmp_path / "run" / "model" / "card.json").read_text())
    assert card["steps"] == 3 and card["parameters"]["unet"] > 0
    assert list((tmp_path / "run").glob("sample-*.png"))
