"""Stacked LoRAs: one file that does what the stages did one after the other."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import small_inpainter
from peft import LoraConfig, get_peft_model

from guardpaint.draft.loading import LORA, load_pipeline
from guardpaint.errors import BadCheckpoint
from guardpaint.repair.inpainter import Inpainter
from guardpaint.store.checkpoint import write_json
from guardpaint.train import stack


def stage(unet, run, rank, modules, seed, alpha=None):
    """A LoRA with weights in both halves, saved as an alignment run leaves it; returns the merged UNet."""
    torch.manual_seed(seed)
    net = get_peft_model(unet, LoraConfig(r=rank, lora_alpha=alpha or rank, target_modules=modules))
    for name, p in net.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    net.save_pretrained(run / "lora")
    write_json(run / "model" / "card.json", {"seed": seed})
    return net.merge_and_unload()


def test_two_stages_in_one_file_paint_as_both_in_turn(tmp_path):
    small_inpainter(tmp_path / "inpainter")
    unet = load_pipeline(tmp_path / "inpainter").unet
    before = {k: v.clone() for k, v in unet.state_dict().items()}
    unet = stage(unet, tmp_path / "a", 2, ["to_q", "conv1", "conv_in"], 1)
    unet = stage(unet, tmp_path / "b", 3, ["to_q", "to_out.0"], 2)
    file = stack.run([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    shutil.copy(file, tmp_path / "inpainter" / LORA)
    loaded = Inpainter.from_pretrained(tmp_path / "inpainter").pipe.unet.state_dict()
    changed = 0
    for name, value in unet.state_dict().items():
        torch.testing.assert_close(loaded[name], value, atol=2e-3, rtol=2e-3)
        changed += int(not torch.allclose(before[name], value))
    assert changed >= 4
    again = Inpainter.from_pretrained(tmp_path / "inpainter")
    again.save_pretrained(tmp_path / "inpainter")
    twice = Inpainter.from_pretrained(tmp_path / "inpainter").pipe.unet.state_dict()
    for name, value in loaded.items():
        torch.testing.assert_close(twice[name], value, atol=2e-3, rtol=2e-3)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "unet").symlink_to(tmp_path / "inpainter" / "unet")
    with pytest.raises(BadCheckpoint, match="are links"):
        again.save_pretrained(tmp_path / "linked")


def test_a_run_without_a_lora_or_with_another_scale_is_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match="last step"):
        stack.run([tmp_path], tmp_path / "out")
    small_inpainter(tmp_path / "inpainter")
    stage(load_pipeline(tmp_path / "inpainter").unet, tmp_path / "a", 2, ["to_q"], 1, alpha=4)
    with pytest.raises(BadCheckpoint, match="scale 1"):
        stack.run([tmp_path / "a"], tmp_path / "out")
