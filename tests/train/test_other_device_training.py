"""Auditor, readouts, rollouts, proposer and ranker on another device, from their inputs to saved models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from elsewhere import busy_guard

from guardpaint.audit.model import AuditorScorer
from guardpaint.bases import Base, load_base
from guardpaint.config import GateSettings
from guardpaint.data import views
from guardpaint.data.views import Labelled
from guardpaint.draft.natural import natural_pictures
from guardpaint.draft.readouts import equations, solved
from guardpaint.repair.knobs import UniformProposer
from guardpaint.repair.proposer import TournamentProposer
from guardpaint.repair.ranker import Ranker
from guardpaint.testbed import Prompt
from guardpaint.testing import small
from guardpaint.testing.other_device import OTHER, other_device
from guardpaint.train import auditor as train_auditor
from guardpaint.train import proposer as train_proposer
from guardpaint.train import ranker as train_ranker
from guardpaint.train import rollouts
from guardpaint.train.auditor_start import Start
from guardpaint.train.engine import moved

NAMES = ("safe", "nudity", "violence")
PROMPTS = [Prompt("1", "a person", 1, kind="plain"), Prompt("2", "a house", 2, kind="plain")]


@pytest.fixture(autouse=True)
def device():
    with other_device() as device:
        yield device


def noise(count, first):
    """Labelled noise as finished views of a corpus."""
    g = torch.Generator().manual_seed(first)
    category = torch.arange(count) % 3
    batch = Labelled(
        images=torch.rand(count, 3, 64, 64, generator=g),
        masks=torch.zeros(count, 1, 1, dtype=torch.bool),
        category=category,
        seeds=list(range(first, first + count)),
        prompts=[f"picture {i} of {NAMES[c]}" for i, c in enumerate(category.tolist())],
        names=NAMES,
    )
    return replace(batch.views(batch.images, "clean"), strength=torch.where(category == 0, 0.0, 0.8))


def test_stage_auditor(tmp_path):
    """Both sizes, artefacts, validation, a stop and its resumption, calibrated faithfulness, a saved model."""
    for split, first in (("train", 0), ("validation", 1000)):
        views.store([noise(24, first)], tmp_path / f"small-{split}.pt")
    recipe = {"shape": {"small": True, "sizes": [32, 64]}, "composites": 0.5, "fine": 0.5, "pairs": 4,
              "losses": {"maps": 0.5, "seam_maps": 0.5}}  # fmt: skip
    train = {"steps": 4, "batch_size": 6, "learning_rate": 0.001, "warmup": 1, "seed": 1, "validate_every": 2}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": recipe, "train": train}))
    for minutes in (0.0, None):
        train_auditor.run(tmp_path / "c.yaml", tmp_path, tmp_path / "run", minutes, quiet=True)
    made = AuditorScorer.from_pretrained(tmp_path / "run/model")
    assert made.device.type == "cpu" and float(made.f_slope) != 4.0
    start = Start(warm=tmp_path / "run/model")
    train_auditor.run(tmp_path / "c.yaml", tmp_path, tmp_path / "warm", None, start=start, quiet=True)
    assert (tmp_path / "warm/model/card.json").exists()


def test_stage_readouts():
    """The fitted map is the CPU's, and reads on the device."""
    tiny, pictures = small.tiny_decoder(4), list(natural_pictures(3, 64))
    here = solved("x", equations(tiny, pictures), {})
    there = solved("x", equations(tiny.to(OTHER), pictures), {})
    assert torch.allclose(here.maps[2].weight, there.maps[2].weight, atol=1e-2)


@pytest.fixture
def guard():
    return busy_guard(OTHER)


@pytest.fixture
def states(guard):
    base = load_base("tiny-sd")
    base = Base(base.name, base.pipe.to(OTHER), base.call)
    return [s for s in rollouts.catch(guard, base, PROMPTS) if s is not None]


@pytest.fixture
def played(states, guard, tmp_path):
    assert rollouts.play_all(states, guard, UniformProposer(), 3, tmp_path / "train") == 2
    rollouts.save_states(states, tmp_path / "tiny-sd-train.pt")
    return tmp_path


def test_stage_rollouts(states, guard, played):
    """States are caught on the device, kept on the CPU, and replayed on the device by a learned proposer too."""
    kept = rollouts.load_states(played / "tiny-sd-train.pt")
    assert len(kept) == 2 and {kept[0].latent.device.type, kept[0].control.device.type} == {"cpu"}
    row, _ = rollouts.play(kept[0], guard.parts, guard.parts.proposer, 3)
    assert len(row["S"]) == 3 and len(rollouts.read_rollouts(played / "train")) == 2


def config(folder, model, **train):
    values = {"steps": 3, "batch_size": 2, "learning_rate": 0.001, "warmup": 1, "seed": 1, **train}
    (folder / "c.yaml").write_text(json.dumps({"model": model, "train": values}))
    return folder / "c.yaml"


def test_stage_proposer_offline(played):
    file = config(played, {"mode": "offline"})
    for minutes in (0.0, None):
        train_proposer.run(file, played, played / "run", minutes, quiet=True)
    assert TournamentProposer.from_pretrained(played / "run/model").config.image_dim == 256


def test_stage_proposer_online(played, guard, tmp_path):
    """The policy in training plays on the device with the parts of a guard."""
    guard.save_pretrained(tmp_path / "guard")
    file = config(tmp_path, {"mode": "online", "tournaments": 1, "candidates": 2}, steps=2)
    train_proposer.run(file, played, tmp_path / "run", None, guard=str(tmp_path / "guard"), quiet=True)
    assert (tmp_path / "run/model/card.json").exists()


def test_online_tournaments_are_played_on_the_device(states, guard):
    shape = train_proposer.ProposerTraining(mode="online", tournaments=1, candidates=2)
    model = train_proposer.build(
        shape, train_proposer.InputSizes(32, 256, 4), GateSettings("relative", 0.1, "on"), 1
    ).to(OTHER)
    batch = train_proposer.online(states, guard.parts, model, shape, 1)(0)
    out = train_proposer.averaged([train_proposer.tournament_loss(model, t, 0.01) for t in moved(batch, OTHER)])
    out["loss"].backward()
    assert model.mean.weight.grad.device == OTHER


def test_a_run_of_the_device_goes_on_where_there_is_none(played, monkeypatch):
    """What was saved on the device resumes on the CPU, and the other way round."""
    file = config(played, {}, steps=4)
    for minutes, place in ((0.0, OTHER), (0.0, "cpu"), (None, OTHER)):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(place))
        AcceleratorState._reset_state(True)
        train_ranker.run(file, played, played / "run", minutes, quiet=True)
    assert (played / "run/model/card.json").exists()


def test_stage_ranker(played):
    train_ranker.run(config(played, {}, steps=4), played, played / "run", None, quiet=True)
    assert Ranker.from_pretrained(played / "run/model").config.features == 17
