"""The tiny decoder's trainer: it learns to decode another autoencoder's latents, as the pipelines hold them."""

from __future__ import annotations

import json

import torch

from guardpaint.draft.codec import vae_decode
from guardpaint.train.engine import Run
from paperdolls.models import tiny_decoder, vae


def test_latents_are_those_of_the_pipelines():
    """Scaled and shifted: the full decode of them is the round trip."""
    net = vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0).eval()
    net.register_to_config(scaling_factor=0.5, shift_factor=0.2)
    images = vae.scenes(0, 2)
    with torch.no_grad():
        back = net.decode(net.encode(images).latent_dist.mode()).sample
        z = tiny_decoder.latents(net, images)
        again = vae_decode(net, z, torch.device("cpu"))
    torch.testing.assert_close(again, (back / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=1e-4)


def test_it_trains_and_ships_with_its_card(tmp_path):
    from diffusers import AutoencoderTiny

    vae.build(vae.VaeConfig(channels=(8, 8, 16)), 0).save_pretrained(tmp_path / "vae")
    train = {"steps": 12, "batch_size": 4, "learning_rate": 0.003, "warmup": 1}
    config = {"model": {"channels": [8, 8, 8], "blocks": [1, 1, 1]}, "train": train}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    tiny_decoder.run(Run(tmp_path / "c.yaml", tmp_path / "run", 0.0, quiet=True), tmp_path / "vae")
    assert not (tmp_path / "run/model").exists()
    tiny_decoder.run(Run(tmp_path / "c.yaml", tmp_path / "run", quiet=True), tmp_path / "vae")
    rows = [line.split(",") for line in (tmp_path / "run/loss.csv").read_text().splitlines()[1:]]
    losses = [float(r[2]) for r in rows]
    assert sum(losses[-3:]) < sum(losses[:3])
    model = AutoencoderTiny.from_pretrained(tmp_path / "run/model")
    assert model.config.latent_channels == 4
    out = model.float().decode(torch.zeros(1, 4, 16, 16)).sample
    assert out.shape == (1, 3, 64, 64)
    card = json.loads((tmp_path / "run/model/card.json").read_text())
    assert card["metrics"]["psnr"]["n"] == 500 and (tmp_path / "run/samples.png").exists()
