"""Every judge that opens a published model, on small random-initialised instances of the real classes.

`build` writes the files that a publisher would publish and returns the judge's name for `open_judge`. What such a judge
says means nothing; it shows that a judge's files are read and its model is called as they want to be.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import read_json, write_json
from guardpaint.testing import hub_layouts, small_detectors, small_inpainters, small_vlms
from guardpaint.testing.small import seeded

HIDDEN = 12


def of_hub(kind: str, repository: str, more: str = "") -> Callable[[Path], str]:
    """A judge that is one repository of the hub."""
    return lambda folder: f"{kind}:{hub_layouts.build(repository, folder)}{more}"


def encoder(folder: Path) -> Path:
    return hub_layouts.build("openai/clip-vit-large-patch14", folder)


def width_of(clip: Path) -> int:
    from transformers import CLIPConfig

    return int(CLIPConfig.from_pretrained(clip, local_files_only=True).projection_dim)


def q16(folder: Path) -> str:
    """Two learned prompts as Q16 publishes them: the pickle of an array."""
    clip = encoder(folder)
    prompts = np.random.default_rng(0).standard_normal((2, width_of(clip))).astype(np.float32)
    (folder / "prompts.p").write_bytes(pickle.dumps(prompts))
    return f"q16:{folder / 'prompts.p'}#{clip}"


def multiheaded(folder: Path) -> str:
    """Five heads as unsafe-diffusion publishes them: one state dict for each in a .pt file."""
    import torch
    from torch import nn

    clip = encoder(folder)
    place = folder / "multi-headed"
    place.mkdir(parents=True, exist_ok=True)
    with seeded(0):
        for name in ("sexual", "violent", "disturbing", "hateful", "political"):
            layers = (nn.Linear(width_of(clip), HIDDEN), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(HIDDEN))
            torch.save(nn.Sequential(*layers, nn.Linear(HIDDEN, 1)).state_dict(), place / f"{name}.pt")
    return f"multiheaded:{place}#{clip}"


def stock(folder: Path) -> str:
    """The two folders of a Stable Diffusion pipeline that its checker needs."""
    from transformers import CLIPImageProcessorPil

    with seeded(0):
        small_inpainters.safety_checker().save_pretrained(folder / "safety_checker")
    CLIPImageProcessorPil().save_pretrained(folder / "feature_extractor")
    return f"stock:{folder}"


def detector(folder: Path) -> str:
    """Grounding DINO on pictures of 128 px: at the stand-in's own 64 px its last level is one cell, too few to norm."""
    place = hub_layouts.build("IDEA-Research/grounding-dino-base", folder)
    settings = place / "preprocessor_config.json"
    write_json(settings, {**read_json(settings), "size": {"shortest_edge": 128, "longest_edge": 128}})
    return f"detector:{place}"


def llavaguard(folder: Path) -> str:
    return f"llavaguard:{small_detectors.saved(small_vlms.llava(), folder)}"


JUDGES: dict[str, Callable[[Path], str]] = {
    "vlm": of_hub("vlm", "OpenGVLab/InternVL3_5-8B-HF"),
    "vlm_qwen25": of_hub("vlm", "Qwen/Qwen2.5-VL-7B-Instruct"),
    "vlm_qwen3": of_hub("vlm", "Qwen/Qwen3-VL-8B-Instruct"),
    "llavaguard": llavaguard,
    "shieldgemma": of_hub("shieldgemma", "google/shieldgemma-2-4b-it"),
    "detector": detector,
    "q16": q16,
    "multiheaded": multiheaded,
    "stock": stock,
    "classifier": of_hub("classifier", "Falconsai/nsfw_image_detection", "#normal=safe,nsfw=nudity"),
}
"""Judges by name; a name before an underscore is the word that the judge's own name begins with."""


def build(name: str, folder: Path) -> str:
    """Write the files of a judge into a folder and return the name to open it with."""
    if name not in JUDGES:
        raise BadInput(f"judge {name!r}: the small random ones are {', '.join(JUDGES)}")
    folder.mkdir(parents=True, exist_ok=True)
    return JUDGES[name](folder)
