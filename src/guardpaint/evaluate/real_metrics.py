"""Metrics for real models: fit to the prompt (CLIP score, BLIP matching), and distance of two sets of pictures (FID).

All use `transformers` models from a folder or the hub:
  clip:FOLDER   clip:hub:openai/clip-vit-large-patch14   blip:hub:Salesforce/blip-itm-base-coco
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.store.folders import resolve
from guardpaint.store.images import load_image
from guardpaint.store.progress import track

LOADING = (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError, BadCheckpoint)


@runtime_checkable
class PromptMetric(Protocol):
    """Says how well pictures fit their prompts: one number each, higher is better."""

    name: str

    def score(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]: ...


class Paired:
    """A `transformers` model that reads pictures and prompts together."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model.eval(), processor

    def look(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> Any:
        values = self.processor(
            text=list(prompts), images=list(images), return_tensors="pt", padding=True, truncation=True
        )
        return self.model(**values.to(self.model.device))


class ClipScore(Paired):
    """100 · max(0, cosine) of image and text embeddings."""

    name = "clip"

    @classmethod
    def from_pretrained(cls, path: str) -> ClipScore:
        from transformers import CLIPModel, CLIPProcessor

        folder = resolve(path)
        model = CLIPModel.from_pretrained(folder, use_safetensors=True, local_files_only=True)
        return cls(model, CLIPProcessor.from_pretrained(folder, local_files_only=True))

    @torch.no_grad()
    def score(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        out = self.look(images, prompts)
        cosine = nn.functional.cosine_similarity(out.image_embeds, out.text_embeds)
        return (100 * cosine.clamp(min=0)).tolist()


class BlipMatch(Paired):
    """Probability that picture and prompt belong together, by BLIP's image–text matching head."""

    name = "blip"

    @classmethod
    def from_pretrained(cls, path: str) -> BlipMatch:
        from transformers import BlipForImageTextRetrieval, BlipProcessor

        folder = resolve(path)
        model = BlipForImageTextRetrieval.from_pretrained(folder, use_safetensors=True, local_files_only=True)
        return cls(model, BlipProcessor.from_pretrained(folder, local_files_only=True))

    @torch.no_grad()
    def score(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        return self.look(images, prompts).itm_score.softmax(1)[:, 1].tolist()


KINDS = {"clip": ClipScore, "blip": BlipMatch}


def open_metric(spec: str) -> PromptMetric:
    """A metric from `kind:path`."""
    kind, _, where = spec.partition(":")
    if kind not in KINDS or not where:
        raise BadConfig(f"metric {spec!r}: write {' or '.join(f'{k}:MODEL' for k in KINDS)}")
    try:
        metric: PromptMetric = KINDS[kind].from_pretrained(where)  # type: ignore[attr-defined]
    except LOADING as error:
        raise BadInput(f"metric {spec!r} cannot be loaded: {error}") from error
    return metric


class VisionFeatures(nn.Module):
    """Pooled features of a `transformers` vision model, from pixels as bytes, for Fréchet distances."""

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__()
        self.model, self.processor = model.eval(), processor
        self.num_features = int(model.config.hidden_size)

    @classmethod
    def from_pretrained(cls, path: str) -> VisionFeatures:
        from transformers import AutoImageProcessor, CLIPVisionModel

        try:
            folder = resolve(path)
            model = CLIPVisionModel.from_pretrained(folder, use_safetensors=True, local_files_only=True)
            return cls(model, AutoImageProcessor.from_pretrained(folder, use_fast=False, local_files_only=True))
        except LOADING as error:
            raise BadInput(f"features {path!r} cannot be loaded: {error}") from error

    @torch.no_grad()
    def forward(self, images: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        pictures = [Image.fromarray(i.permute(1, 2, 0).cpu().numpy()) for i in images]
        values = self.processor(images=pictures, return_tensors="pt").to(self.model.device)
        return self.model(**values).pooler_output


def fid(features: nn.Module, real: Sequence[Path], made: Sequence[Path], batch: int = 16) -> float:
    """Fréchet distance between two sets of pictures in a feature space; FID when the space is Inception's."""
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance
    except ImportError as error:
        raise BadInput("Fréchet distances need torchmetrics: pip install 'guardpaint[metrics]'") from error
    if min(len(real), len(made)) < 2:
        raise BadInput(f"{len(real)} and {len(made)} pictures: a distance between sets needs at least two of each")
    distance = FrechetInceptionDistance(feature=features, normalize=False, input_img_size=(3, 64, 64))
    for paths, is_real in ((real, True), (made, False)):
        for i in track(range(0, len(paths), batch), description="reference" if is_real else "made"):
            pictures = [load_image(p).convert("RGB").resize((299, 299)) for p in paths[i : i + batch]]
            distance.update(torch.stack([as_bytes(p) for p in pictures]), real=is_real)
    return float(distance.compute())


def as_bytes(picture: Image.Image) -> UInt8[Tensor, "3 h w"]:
    """An RGB picture as a tensor of bytes."""
    import numpy as np

    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def pictures_in(folder: Path) -> list[Path]:
    """The picture files of a folder, sorted by name."""
    files = sorted(p for p in folder.glob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"))
    if not files:
        raise BadInput(f"{folder}: no pictures in it; name a folder with PNG, JPEG or WebP files")
    return files
