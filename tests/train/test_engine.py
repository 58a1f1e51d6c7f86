"""The training engine: what a resumed run must have in common with an uninterrupted one."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.train.engine import Ema, TrainConfig, fit, load_config, write_card
from paperdolls.models.vae import TEST_SEEDS, VaeConfig, build, psnr, reconstruction, run, scenes


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))


def batches(step):
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(step))


def losses(net, x):
    return {"loss": ((net(x) + x) ** 2).mean()}


CONFIG = TrainConfig(steps=12, batch_size=4, learning_rate=1e-2, warmup=2, ema=0.9)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Stopped after every step (minutes=0) and resumed: the same weights, the same loss curve."""
    whole = fit(model(), batches, losses, CONFIG, tmp_path / "whole", quiet=True)
    for _ in range(12):
        pieces = fit(model(), batches, losses, CONFIG, tmp_path / "pieces", minutes=0.0, quiet=True)
    for a, b in zip(whole.state_dict().values(), pieces.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    curves = [(tmp_path / name / "loss.csv").read_text() for name in ("whole", "pieces")]
    assert curves[0] == curves[1] and curves[0].count("\n") == 13
    assert json.loads((tmp_path / "pieces" / "run.json").read_text())["step"] == 12


def test_training_lowers_the_loss(tmp_path):
    fit(model(), batches, losses, TrainConfig(steps=60, batch_size=4, learning_rate=1e-2), tmp_path, quiet=True)
    values = [float(r.split(",")[2]) for r in (tmp_path / "loss.csv").read_text().splitlines()[1:]]
    assert sum(values[-5:]) < 0.8 * sum(values[:5])


def test_rates_by_hand():
    """Warm-up over 2 steps: half, then full; cosine at the middle: half; the end: a hundredth at least."""
    c = TrainConfig(steps=100, batch_size=1, learning_rate=1.0, warmup=2)
    assert c.rate(0) == pytest.approx(0.5) and c.rate(50) == pytest.approx(0.5) and c.rate(100) == pytest.approx(0.01)
    linear = TrainConfig(steps=100, batch_size=1, learning_rate=1.0, warmup=1, schedule="linear")
    assert linear.rate(25) == pytest.approx(0.75)


def test_ema_by_hand():
    """First update keeps 2/11 of the start: 0·2/11 + 1·9/11."""
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.zero_()
    ema = Ema(net, 0.999)
    net.weight.data.fill_(1.0)
    ema.update(net)
    assert ema.shadow["weight"].item() == pytest.approx(9 / 11)


def test_a_nan_loss_stops_with_the_checkpoint_intact(tmp_path):
    fit(model(), batches, losses, CONFIG, tmp_path, minutes=0.0, quiet=True)
    before = (tmp_path / "state.pt").read_bytes()
    with pytest.raises(FloatingPointError, match="step 1"):
        fit(model(), batches, lambda n, x: {"loss": n(x).sum() * float("nan")}, CONFIG, tmp_path, quiet=True)
    assert (tmp_path / "state.pt").read_bytes() == before


def test_a_half_written_checkpoint_is_named(tmp_path):
    fit(model(), batches, losses, CONFIG, tmp_path, minutes=0.0, quiet=True)
    path = tmp_path / "state.pt"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(BadCheckpoint, match="cannot resume"):
        fit(model(), batches, losses, CONFIG, tmp_path, quiet=True)


@pytest.mark.parametrize("text", ["model: {}", "train: {steps: 1}", "[", "model: {colour: 1}\ntrain: {}"])
def test_bad_config_files(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadConfig, match="model and train"):
        load_config(path, VaeConfig)
    with pytest.raises(BadConfig, match="no such"):
        load_config(tmp_path / "none.yaml", VaeConfig)
    with pytest.raises(BadConfig, match="steps=0"):
        TrainConfig(steps=0, batch_size=1, learning_rate=1.0)


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
    run(config, tmp_path / "run", minutes=0.0)
    assert not (tmp_path / "run" / "model").exists(), "not finished yet"
    run(config, tmp_path / "run", minutes=None)
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(tmp_path / "run" / "model").float()
    assert psnr(vae, scenes(TEST_SEEDS, 2)).shape == (2,)
    card = json.loads((tmp_path / "run" / "model" / "card.json").read_text())
    assert card["steps"] == 3 and card["metrics"]["psnr"]["n"] == 500 and card["seed"] == 1
    assert vae.config.scaling_factor > 0


def test_a_rate_that_yaml_reads_as_text_is_explained(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {}\ntrain: {steps: 1, batch_size: 1, learning_rate: 1e-3}\n")
    with pytest.raises(BadConfig, match=r"learning_rate='1e-3' is text; YAML reads 1e-3 so, write 1.0e-3"):
        load_config(tmp_path / "c.yaml", dict)


def test_a_card_tells_where_its_model_started(tmp_path):
    done = {"step": 3, "minutes": 1.0, "config": {"seed": 7}}
    for name, warm in (("first", None), ("second", tmp_path / "first" / "model"), ("third", tmp_path / "none")):
        write_card(tmp_path / name, f"train {name}", done, warm)
    read = lambda name: json.loads((tmp_path / name / "model" / "card.json").read_text())  # noqa: E731
    assert read("second")["starts_from"] == read("first") and "starts_from" not in read("third")
