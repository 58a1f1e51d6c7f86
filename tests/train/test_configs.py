"""Every config that ships is one its trainer takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from paperdolls.models.distil import DistilConfig
from paperdolls.models.recipe import GeneratorConfig
from paperdolls.models.tiny_decoder import TinyConfig
from paperdolls.models.vae import VaeConfig
from paperdolls.oracle import OracleConfig

from guardpaint.train.align import AlignConfig
from guardpaint.train.auditor import AuditorRecipe
from guardpaint.train.engine import load_config
from guardpaint.train.proposer import ProposerTraining
from guardpaint.train.ranker import RankerTraining

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))
KINDS = {"turbo": DistilConfig, "auditor": AuditorRecipe, "proposer": ProposerTraining, "ranker": RankerTraining,
         "sft": AlignConfig, "kto": AlignConfig, "bco": AlignConfig, "tiny": TinyConfig, "vae": VaeConfig,
         "oracle": OracleConfig, "mini": GeneratorConfig}  # fmt: skip
"""By a word in the file's name, the first that fits."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_is_taken_by_its_trainer(path):
    kind = next(k for word, k in KINDS.items() if word in path.stem)
    shape, config = load_config(path, kind)
    assert isinstance(shape, kind) and config.steps > 0 and config.learning_rate > 0
    if isinstance(shape, AuditorRecipe):
        shape.config()
