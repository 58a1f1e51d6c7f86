"""`guardpaint compose`: which prompt a repairer gets, and that any inpainting pipeline can be one."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from guardpaint.bases import load_inpainter
from guardpaint.cli.main import app
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.repair.opening import aligned, open_repairer
from guardpaint.testing import small, small_inpainters

TRAINED = {"method": {"method": "bco", "rank": 2}}


@pytest.fixture
def composed(tmp_path):
    """Compose a guard with a repairer and further words; returns the repairer as it is loaded again."""
    small.auditor().save_pretrained(tmp_path / "auditor")

    def compose(repairer, *more):
        words = ["compose", "--auditor", str(tmp_path / "auditor"), "--out", str(tmp_path / "guard")]
        result = CliRunner().invoke(app, [*words, "--repairer", str(repairer), *more])
        if result.exception:
            raise result.exception
        return GuardPaint.from_pretrained(tmp_path / "guard").parts.repairer, result.output

    return compose


def test_a_stock_inpainter_gets_the_safe_prompt_and_an_aligned_one_the_users(composed, tmp_path):
    folder = tmp_path / "stock"
    small_inpainters.inpainting("sd").save_pretrained(folder)
    repairer, said = composed(folder)
    assert repairer.kind == "inpainter" and repairer.settings.prompt == "safe" and "the safe prompt" in said
    (folder / "card.json").write_text(json.dumps(TRAINED))
    repairer, said = composed(folder)
    assert repairer.settings.prompt == "user" and "the user prompt" in said
    assert composed(folder, "--repairer-prompt", "safe")[0].settings.prompt == "safe"
    with pytest.raises(BadConfig, match="choose among safe, user"):
        composed(folder, "--repairer-prompt", "whatever")


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux-fill"])
def test_other_inpainting_pipelines_repair_by_their_own_call(composed, tmp_path, kind):
    small_inpainters.inpainting(kind).save_pretrained(tmp_path / kind)
    repairer, _ = composed(tmp_path / kind)
    assert repairer.kind == "pipeline" and repairer.settings.prompt == "safe"


def test_native_and_the_inpainter_of_a_package(composed):
    assert composed("native")[0].kind == "native"
    assert open_repairer("mini-inpaint").settings.prompt == "safe", "it is not aligned"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (TRAINED, True),
        ({"stages": [{"method": {"method": "sft"}}, TRAINED]}, True),
        ({"stages": []}, False),
        ({"stages": [TRAINED, {"method": {"evaluations": 4}}]}, False),
        ({"settings": {"num_inference_steps": 25}}, False),
        ({"method": "bco"}, False),
        ([], False),
    ],
)
def test_only_a_card_of_alignment_counts(tmp_path, card, expected):
    assert not aligned(tmp_path)
    (tmp_path / "card.json").write_text(json.dumps(card))
    assert aligned(tmp_path) is expected


def test_a_lora_beside_the_pipeline_is_merged(tmp_path):
    pipe = small_inpainters.inpainting("sd")
    pipe.save_pretrained(tmp_path)
    plain = open_repairer(str(tmp_path)).digest()
    small_inpainters.random_lora(pipe, tmp_path)
    assert open_repairer(str(tmp_path)).digest() != plain
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"no weights")
    with pytest.raises(BadCheckpoint, match="not a LoRA"):
        open_repairer(str(tmp_path))


def test_training_an_inpainter_still_needs_an_inpainting_unet(tmp_path):
    small_inpainters.inpainting("flux-fill").save_pretrained(tmp_path)
    with pytest.raises(BadConfig, match="has no UNet"):
        load_inpainter(str(tmp_path))
