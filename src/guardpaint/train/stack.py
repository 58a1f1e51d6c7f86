"""Combine LoRAs that were trained on top of each other into one, by concatenating their ranks.

guardpaint train mini-inpaint-safe --stage stack --out runs/mini-inpaint-safe
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from guardpaint.draft.loading import LORA
from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import read_json, write_atomic, write_json

PREFIX = "base_model.model."


def adapter(run: Path) -> dict[str, Tensor]:
    """The LoRA of a finished alignment run; its scale (alpha over rank) must be 1."""
    file, shape = run / "lora" / "adapter_model.safetensors", run / "lora" / "adapter_config.json"
    if not file.exists():
        raise BadCheckpoint(f"{file}: no such file; train the run until its last step")
    config = read_json(shape)
    if config["lora_alpha"] != config["r"]:
        raise BadCheckpoint(
            f"{shape}: alpha {config['lora_alpha']} over rank {config['r']}; only scale 1 can be stacked"
        )
    return {k.removeprefix(PREFIX): v for k, v in load_file(file).items()}


def stacked(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """W + B₁A₁ + B₂A₂ + … = W + [B₁ B₂ …][A₁; A₂; …], for every module that any part changes."""
    out = {}
    for name in sorted({k for part in parts for k in part}):
        matrices = [part[name] for part in parts if name in part]
        out[f"unet.{name}"] = torch.cat(matrices, 0 if ".lora_A." in name else 1).half().contiguous()
    return out


def run(runs: list[Path], out: Path) -> Path:
    """Write one LoRA that diffusers can load, with the cards of its stages; returns its path."""
    tensors = stacked([adapter(r) for r in runs])
    file = out / "model" / LORA
    write_atomic(file, save(tensors))
    write_json(out / "model" / "card.json", {"stages": [read_json(r / "model" / "card.json") for r in runs]})
    return file
