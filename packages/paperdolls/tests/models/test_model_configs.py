"""The world's models in stages: every config is taken by its trainer, and every input can be found."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import yaml

from guardpaint.train import catalogue, stages
from guardpaint.train.auditor import AuditorRecipe
from guardpaint.train.engine import parse_config
from paperdolls.models.catalogue import CATALOGUE

MODELS = {name: catalogue.load_model(str(CATALOGUE.path(name))) for name in CATALOGUE.names()}
STAGES = [pytest.param(m, s, id=f"{name}-{s.name}") for name, m in MODELS.items() for s in m.stages]
GIVEN = {"views", "pairs", "rollouts"}


def test_the_product_finds_these_models():
    assert any(known is CATALOGUE for known in catalogue.catalogues())
    assert set(MODELS) < set(catalogue.model_names())


LARGER = "-128"
"""Ends the names of the models at 128 pixels, which do not ship yet."""


def test_one_config_for_every_model_that_ships():
    assert {name for name in MODELS if not name.endswith(LARGER)} == {
        "vae4", "vae16", "tiny4", "tiny16", "mini-sd", "mini-inpaint", "mini-sdxl", "mini-sd3", "mini-sd3-turbo",
        "mini-flux", "oracle", "mini-auditor", "mini-inpaint-safe", "mini-inpaint-few", "mini-proposer", "mini-ranker",
    }  # fmt: skip
    assert all((CATALOGUE.shipped(name) is None) == name.endswith(LARGER) for name in MODELS)
    assert {name.removesuffix(LARGER) for name in MODELS if name.endswith(LARGER)} < set(MODELS)


@pytest.mark.parametrize(("model", "stage"), STAGES)
def test_a_stage_is_taken_by_its_trainer(model, stage):
    catalogue.check_stage(stage, model.name)
    shape = catalogue.trainers()[stage.trainer].shape
    if shape is AuditorRecipe:
        parse_config(stage.config, shape, stage.name)[0].config()


@pytest.mark.parametrize("name", list(MODELS))
def test_every_input_is_a_stage_a_model_or_asked_for(name, tmp_path):
    """With the values of the command line given, only what is not shipped can be missing: stages, and larger models."""
    asked = {r[1:] for s in MODELS[name].stages for refs in s.inputs.values() for r in refs if r.startswith("$")}
    assert asked <= GIVEN
    plan = stages.make_plan(name, tmp_path / name, [s.name for s in MODELS[name].stages], {k: ["x"] for k in asked})
    lacking = [sentence for step in plan.steps for sentence in step.missing]
    stage, larger = (
        "/first is not trained yet: guardpaint train mini-sd",
        f"{LARGER} is not trained yet: guardpaint train",
    )
    assert all(stage in sentence or larger in sentence for sentence in lacking)


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("mini-inpaint-safe", "mini-proposer", "mini-ranker")])
def test_each_stage_goes_on_from_the_one_before(name):
    """A reader or a later part that starts from nothing would be a mistake in the file."""
    trained = [s for s in MODELS[name].stages if s.trainer != "reader"]
    for before, stage in pairwise(trained):
        assert stage.inputs["warm"] == (before.name,)


def test_an_autoencoder_and_its_tiny_decoder_through_their_stages(tmp_path):
    """Two parts of a small vae4; then a tiny4 that finds it beside its own run."""
    for name, change in (("vae4", {"channels": [8, 8, 16]}), ("tiny4", {"channels": [8, 8, 8], "blocks": [1, 1, 1]})):
        data = yaml.safe_load(CATALOGUE.path(name).read_text())
        for stage in data["stages"]:
            stage["model"] |= change
            stage["train"] = {"steps": 1, "batch_size": 2, "learning_rate": 0.001, "warmup": 1}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
        plan = stages.make_plan(str(tmp_path / f"{name}.yaml"), tmp_path / "runs" / name)
        assert stages.execute(plan, None, print, quiet=True)
    card = json.loads((tmp_path / "runs/vae4/finish/model/card.json").read_text())
    assert card["command"].startswith(f"guardpaint train {tmp_path / 'vae4.yaml'} --stage finish")
    record = yaml.safe_load((tmp_path / "runs/tiny4/decoder/stage.yaml").read_text())
    assert record["inputs"]["vae"] == [str(tmp_path / "runs/vae4/finish/model")]
