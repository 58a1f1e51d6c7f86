"""Opens the repairer that a name means, and chooses the prompt that its model is given.

A model without safety training that is given the user's prompt repaints the harm, so it gets the policy's safe prompt.
Only a model whose card says that `guardpaint train` aligned it gets the user's prompt by itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from guardpaint.draft.intact import check_intact, only_variant
from guardpaint.draft.loading import LORA, fuse, load_tiny, pipeline_folder
from guardpaint.draft.options import FP32
from guardpaint.errors import BadCheckpoint
from guardpaint.repair.folders import merged, open_inpainting
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.native import NativeRepairer
from guardpaint.repair.options import RepairOptions
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.store import plugins
from guardpaint.store.checkpoint import read_json

CARD, TINY = "card.json", "tiny_decoder"
ALIGNING = ("sft", "kto", "bco")
"""Training methods after which an inpainter answers an unsafe prompt with a safe picture."""


def open_repairer(name: str, prompt: str | None = None, token: str | None = None) -> Any:
    """`native`, an inpainting pipeline of an installed package, one in a folder, or one on the hub (`hub:owner/name`).

    `prompt` is `safe` or `user`; None chooses by the folder's card. A LoRA that lies beside a pipeline is merged into
    it. SD 1.5 and 2 run in `Inpainter`, every other pipeline in `PipelineRepairer`.
    """
    RepairOptions.read(prompt or "safe", {})  # before weights are read
    if name == NativeRepairer.kind:
        return NativeRepairer()
    if name in plugins.registered(plugins.BASES):
        pipe = plugins.load(plugins.BASES, name, f"repairer {name!r}").load()
        return repairer_of(pipe, prompt=prompt or "safe")
    folder = pipeline_folder(name, replace(FP32, token=token))
    variant = only_variant(folder)
    check_intact(folder, variant)
    pipe = open_inpainting(folder, torch.float32, variant)
    if (folder / LORA).exists():
        try:
            fuse(pipe, folder)
        except Exception as error:
            raise BadCheckpoint(f"{folder / LORA}: not a LoRA for {type(pipe).__name__} ({error})") from error
    tiny = load_tiny(folder / TINY) if (folder / TINY).is_dir() else None
    prompt = prompt or ("user" if aligned(folder) else "safe")
    return repairer_of(pipe, tiny, prompt=prompt, adapter=merged(folder))


def repairer_of(pipe: Any, tiny: Any | None = None, **options: Any) -> Any:
    """The repairer that runs a pipeline."""
    unet = pipe.components.get("unet")
    masked = unet is not None and unet.config.in_channels == 2 * pipe.vae.config.latent_channels + 1
    if masked and type(pipe).__name__ == "StableDiffusionInpaintPipeline":
        return Inpainter(pipe, tiny, **options)
    return PipelineRepairer(pipe, **options)


def aligned(folder: Path) -> bool:
    """Whether the card of a model says that every stage of its training was one that aligns an inpainter."""
    if not (folder / CARD).is_file():
        return False
    card = read_json(folder / CARD)
    stages = card.get("stages", [card]) if isinstance(card, dict) else []
    methods = [stage.get("method") if isinstance(stage, dict) else None for stage in stages]
    return bool(methods) and all(isinstance(m, dict) and m.get("method") in ALIGNING for m in methods)
