"""Distillation: a jump by hand, and a run from a teacher to a loadable student."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadConfig, BadInput
from guardpaint.testing import small
from guardpaint.train.engine import Run
from paperdolls import bases
from paperdolls.models import distil, generator, vae

SHAPE = {"layers": 1, "single_layers": 1, "heads": 2, "text_width": 32, "tokens": 48, "other_tokens": 16, "merges": 50}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A barely trained mini-sd3 and mini-flux, as run directories."""
    root = tmp_path_factory.mktemp("teachers")
    vae.build(vae.VaeConfig(channels=(8, 8, 16), latent_channels=16), 0).save_pretrained(root / "vae")
    for family in ("sd3", "flux"):
        train = {"steps": 1, "batch_size": 2, "learning_rate": 0.001, "seed": 1}
        config = {"model": {"family": family, **SHAPE, "scenes": 20, "captions": 1}, "train": train}
        (root / f"{family}.yaml").write_text(json.dumps(config))
        generator.run(Run(root / f"{family}.yaml", root / family, quiet=True), root / "vae", generator.Start())
    return root


def test_a_jump_by_hand():
    """From 1 to 3 while σ falls from 0.8 to 0.3: velocity −4; a student that says 0 is off by 16."""
    here, there = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 3.0)

    class Still(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return (torch.zeros_like(hidden_states),)

    text = (torch.zeros(1, 2, 4), torch.zeros(1, 4))
    out = distil.jump_loss(Still(), here, there, torch.tensor([0.8]), torch.tensor([0.3]), text)
    assert out["loss"].item() == pytest.approx(16.0)


def test_levels_are_those_the_pipeline_visits(teachers):
    pipe = load_pipeline(teachers / "sd3" / "model")
    levels = distil.student_levels(pipe, 4)
    assert len(levels) == 5 and levels[0] == 1.0 and levels[-1] == 0.0
    assert all(a > b for a, b in pairwise(levels))


def test_a_student_of_one_step_learns_its_teachers_trajectory(teachers, tmp_path):
    """Four steps, a LoRA; the student's file loads onto the teacher and changes its pictures."""
    model = {"steps": 2, "substeps": 1, "trajectories": 50, "rank": 4}
    train = {"steps": 2, "batch_size": 4, "learning_rate": 0.01, "warmup": 1, "seed": 1, "ema": 0.0}
    (tmp_path / "c.yaml").write_text(json.dumps({"model": model, "train": train}))
    distil.run(Run(tmp_path / "c.yaml", tmp_path / "run", 0.0, quiet=True), teachers / "sd3" / "model")
    assert (tmp_path / "run/trajectories.pt").exists() and not (tmp_path / "run/model").exists()
    distil.run(Run(tmp_path / "c.yaml", tmp_path / "run", quiet=True), teachers / "sd3" / "model")
    card = json.loads((tmp_path / "run/model/card.json").read_text())
    assert card["settings"]["num_inference_steps"] == 2 and card["settings"]["guidance_scale"] == 1.0
    pipe = load_pipeline(teachers / "sd3" / "model")
    call = {**card["settings"], "output_type": "pt"}
    before = pipe("a person", generator=torch.Generator().manual_seed(0), **call).images
    pipe.load_lora_weights(tmp_path / "run/model")
    after = pipe("a person", generator=torch.Generator().manual_seed(0), **call).images
    assert not torch.equal(before, after)


def test_only_an_sd3_is_distilled(teachers, tmp_path):
    train = {"steps": 1, "batch_size": 2, "learning_rate": 0.1}
    (tmp_path / "c.yaml").write_text(json.dumps({"model": {}, "train": train}))
    with pytest.raises(BadConfig, match="FluxPipeline cannot be distilled"):
        distil.run(Run(tmp_path / "c.yaml", tmp_path / "run", quiet=True), teachers / "flux" / "model")


def test_bad_shapes_are_named():
    with pytest.raises(BadConfig, match="steps=0"):
        distil.DistilConfig(steps=0)


def test_adopted_models_share_their_parts(teachers, tmp_path):
    """A second base that brings the same autoencoder links to the first; both load."""
    from guardpaint.errors import BadInput

    assets = tmp_path / "assets"
    assets.mkdir()
    import shutil

    shutil.copytree(teachers / "sd3" / "model" / "vae", assets / "vae16")
    links = bases.adopt(teachers / "sd3", "mini-sd3", assets)
    assert "vae → ../vae16" in links and "tokenizer_2 → ../mini-sd3/tokenizer" not in links
    links = bases.adopt(teachers / "flux", "mini-flux", assets)
    assert "vae → ../vae16" in links
    load_pipeline(assets / "mini-flux")
    assert (assets / "mini-flux" / "vae").is_symlink()
    counted = [p for p in assets.rglob("*") if p.is_file() and p.resolve() == p.absolute()]
    assert bases.megabytes(assets) == pytest.approx(sum(p.stat().st_size for p in counted) / 1e6)
    weights = [p for p in counted if p.suffix == ".safetensors"]
    assert bases.world_megabytes(assets) == pytest.approx(sum(p.stat().st_size for p in weights) / 1e6)
    (assets / "mini-auditor").mkdir()
    (assets / "mini-auditor" / "model.safetensors").write_bytes(b"0" * 1000)
    assert bases.world_megabytes(assets) == pytest.approx(sum(p.stat().st_size for p in weights) / 1e6), "the guard's"
    assert (assets / "mini-flux" / "loss.csv").read_text().startswith("step,loss\n1,")
    with pytest.raises(BadInput, match="no finished model"):
        bases.adopt(tmp_path, "mini-flux", assets)


def test_a_loss_curve_averages_stretches(tmp_path):
    """Four steps in two points: the mean of each pair, at its last step."""
    (tmp_path / "loss.csv").write_text("step,norm,loss\n1,0,1\n2,0,3\n3,0,5\n4,0,7\n")
    (tmp_path / "out").mkdir()
    bases.loss_curve(tmp_path / "loss.csv", tmp_path / "out", points=2)
    assert (tmp_path / "out" / "loss.csv").read_text() == "step,loss\n2,2.00000\n4,6.00000\n"


def test_an_auditor_may_ship_with_one_size(tmp_path):
    from guardpaint.audit.model import AuditorScorer

    auditor = small.auditor()
    auditor.save_pretrained(tmp_path)
    (tmp_path / "card.json").write_text("{}")
    with pytest.raises(BadInput, match="size 7: choose one at which"):
        bases.one_size(tmp_path, 7)
    bases.one_size(tmp_path, auditor.sizes[0])
    assert AuditorScorer.from_pretrained(tmp_path).sizes == (auditor.sizes[0],) * 2
    assert f'"looks_at": {auditor.sizes[0]}' in (tmp_path / "card.json").read_text()
