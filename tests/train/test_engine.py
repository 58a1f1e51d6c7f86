"""The training engine: what a resumed run must have in common with an uninterrupted one."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.train.engine import Ema, Run, TrainConfig, fit, load_config, moved, write_card, write_log


@dataclass(frozen=True)
class Shape:
    """The model part of a config."""

    width: int = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))


def batches(step):
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(step))


def losses(net, x):
    return {"loss": ((net(x) + x) ** 2).mean()}


def sitting(out, minutes=None):
    return Run(Path("unused.yaml"), out, minutes, quiet=True)


CONFIG = TrainConfig(steps=12, batch_size=4, learning_rate=1e-2, warmup=2, ema=0.9)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Stopped after every step (minutes=0) and resumed: the same weights, the same loss curve."""
    whole = fit(model(), batches, losses, CONFIG, sitting(tmp_path / "whole"))
    for _ in range(12):
        pieces = fit(model(), batches, losses, CONFIG, sitting(tmp_path / "pieces", 0.0))
    for a, b in zip(whole.state_dict().values(), pieces.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    curves = [(tmp_path / name / "loss.csv").read_text() for name in ("whole", "pieces")]
    assert curves[0] == curves[1] and curves[0].count("\n") == 13
    assert json.loads((tmp_path / "pieces" / "run.json").read_text())["step"] == 12


def test_ctrl_c_writes_a_checkpoint_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """SIGINT in the middle of the sixth step: six steps are kept, none is lost."""
    whole = fit(model(), batches, losses, CONFIG, sitting(tmp_path / "whole"))
    pressed = []

    def interrupted(index):
        if index == 5 and not pressed:
            pressed.append(os.kill(os.getpid(), signal.SIGINT))
        return batches(index)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(model(), interrupted, losses, CONFIG, sitting(tmp_path / "cut"))
    assert signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "cut" / "run.json").read_text())["step"] == 6
    resumed = fit(model(), interrupted, losses, CONFIG, sitting(tmp_path / "cut"))
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_training_lowers_the_loss(tmp_path):
    fit(model(), batches, losses, TrainConfig(steps=60, batch_size=4, learning_rate=1e-2), sitting(tmp_path))
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
    fit(model(), batches, losses, CONFIG, sitting(tmp_path, 0.0))
    before = (tmp_path / "state.pt").read_bytes()
    with pytest.raises(FloatingPointError, match="step 1"):
        fit(model(), batches, lambda n, x: {"loss": n(x).sum() * float("nan")}, CONFIG, sitting(tmp_path))
    assert (tmp_path / "state.pt").read_bytes() == before


def test_a_half_written_checkpoint_is_named(tmp_path):
    fit(model(), batches, losses, CONFIG, sitting(tmp_path, 0.0))
    path = tmp_path / "state.pt"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(BadCheckpoint, match="cannot resume"):
        fit(model(), batches, losses, CONFIG, sitting(tmp_path))


@pytest.mark.parametrize("text", ["model: {}", "train: {steps: 1}", "[", "model: {colour: 1}\ntrain: {}"])
def test_bad_config_files(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadConfig, match="model and train"):
        load_config(path, Shape)
    with pytest.raises(BadConfig, match="no such"):
        load_config(tmp_path / "none.yaml", Shape)
    with pytest.raises(BadConfig, match="steps=0"):
        TrainConfig(steps=0, batch_size=1, learning_rate=1.0)


def test_a_rate_that_yaml_reads_as_text_is_explained(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {}\ntrain: {steps: 1, batch_size: 1, learning_rate: 1e-3}\n")
    with pytest.raises(BadConfig, match=r"learning_rate='1e-3' is text; YAML takes 1e-3 for text, so write 1.0e-3"):
        load_config(tmp_path / "c.yaml", dict)


def test_a_card_tells_where_its_model_started(tmp_path):
    note = {"step": 3, "minutes": 1.0, "config": {"seed": 7}}
    for name, warm in (("first", None), ("second", tmp_path / "first" / "model"), ("third", tmp_path / "none")):
        write_card(tmp_path / name, f"train {name}", note, warm)
    read = lambda name: json.loads((tmp_path / name / "model" / "card.json").read_text())  # noqa: E731
    assert read("second")["starts_from"] == read("first") and "starts_from" not in read("third")


def test_a_log_keeps_its_columns(tmp_path):
    write_log(tmp_path, [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0, "b": 3.0}])
    write_log(tmp_path, [{"step": 3, "b": 4.0, "a": 5.0, "c": 6.0}])
    assert (tmp_path / "loss.csv").read_text().split() == ["step,a,b", "1,1.0,", "2,2.0,3.0", "3,5.0,4.0"]


@dataclass(frozen=True)
class Part:
    x: torch.Tensor
    name: str


def test_a_batch_moves_whatever_it_is_made_of():
    """Tensors in dictionaries, lists, tuples and dataclasses, nested; what is no tensor stays."""
    x = torch.zeros(2)
    batch = {"a": [x, (x, "text")], "b": [Part(x, "one")], "c": Part(x, "two"), "d": None}
    there = moved(batch, torch.device("meta"))
    tensors = [there["a"][0], there["a"][1][0], there["b"][0].x, there["c"].x]
    assert all(t.device.type == "meta" for t in tensors)
    assert there["a"][1][1] == "text" and there["b"][0].name == "one" and there["d"] is None
    assert moved(batch, torch.device("cpu")) is batch


def test_the_command_of_a_run_names_its_inputs():
    run = Run(Path("c.yaml"), Path("runs/x"))
    assert run.command("oracle", vae=[Path("a"), Path("b")], warm=None, soft=Path("s")) == (
        "guardpaint train stage oracle --config c.yaml --out runs/x --set vae=a --set vae=b --set soft=s"
    )
