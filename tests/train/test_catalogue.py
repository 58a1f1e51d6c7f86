"""The models that can be trained by name: every stage is one its trainer takes; bad files are named."""

from __future__ import annotations

import pytest
import yaml

from guardpaint.errors import BadConfig, BadInput
from guardpaint.store import plugins
from guardpaint.train import catalogue
from guardpaint.train.auditor import AuditorRecipe
from guardpaint.train.engine import parse_config

STAGES = [
    pytest.param(catalogue.load_model(name), stage, id=f"{name}-{stage.name}")
    for name in catalogue.PRODUCT.names()
    for stage in catalogue.load_model(name).stages
]


@pytest.mark.parametrize(("model", "stage"), STAGES)
def test_a_stage_is_taken_by_its_trainer(model, stage):
    catalogue.check_stage(stage, model.name)
    shape = catalogue.trainers()[stage.trainer].shape
    if shape is AuditorRecipe:
        parse_config(stage.config, shape, stage.name)[0].config()


def test_the_products_models():
    assert catalogue.PRODUCT.names() == ["auditor-paper", "proposer-paper", "sd15-inpaint-safe"]
    model = catalogue.load_model("sd15-inpaint-safe")
    assert [s.name for s in model.stages] == ["sft", "bco", "kto", "kto-printed", "stack"]
    assert model.stage("kto").alternative and model.last.name == "stack"
    assert [model.stage(name).config["model"]["kto"] for name in ("kto", "kto-printed")] == ["mended", "printed"]
    assert "  kto          kto        inpainter=sft pairs=$pairs (only with --stage)" in catalogue.described(model)


GOOD = {"name": "a", "trainer": "ranker", "inputs": {"rollouts": "$r"}, "model": {}, "train": {}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "needs `stages`"),
        ({"stages": []}, "stages missing"),
        ({"stages": [{"trainer": "ranker"}]}, "needs `stages`, each with a name"),
        ({"stages": [GOOD, GOOD]}, "its own name"),
        ({"stages": [{**GOOD, "alternative": True}]}, "must not be an alternative"),
        ({"stages": [{**GOOD, "colour": 1}]}, "unknown keys colour"),
    ],
)
def test_bad_files_are_named(tmp_path, data, message):
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(BadConfig, match=message):
        catalogue.load_model(str(file))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": "painter"}, "trainer 'painter' is unknown; choose .*auditor"),
        ({"inputs": {"rollouts": "$r", "views": "$v"}}, "unknown: views, missing: none"),
        ({"inputs": {}}, "ranker takes the inputs rollouts; unknown: none, missing: rollouts"),
        ({"model": {"colour": 1}}, "known keys only"),
        ({"train": {"steps": 1, "batch_size": 1, "learning_rate": "1e-3"}}, "is text"),
    ],
)
def test_bad_stages_are_named(change, message):
    with pytest.raises(BadConfig, match=message):
        catalogue.check_stage(catalogue.parse_stage({**GOOD, **change}), "here")


def test_an_unknown_model_is_named_with_where_others_come_from(monkeypatch):
    monkeypatch.setattr(plugins, "registered", lambda group: {})
    with pytest.raises(BadInput, match="model 'mini-sd': not one of auditor-paper.*pip install paperdolls"):
        catalogue.load_model("mini-sd")
