"""CLIPSeg: where in a picture is what a text describes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.checkpoints import open_model, open_processor
from guardpaint.audit.inputs import prepared
from guardpaint.store.checkpoint import fingerprint
from guardpaint.store.folders import Access, resolve

MOST_CELLS = 44
"""Cells per side of a map; the model's 352 px are pooled to it."""


class Segmenter:
    """A CLIPSegForImageSegmentation with its processor."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model.eval().requires_grad_(False), processor

    @classmethod
    def from_pretrained(cls, folder: str | Path, token: str | None = None) -> Segmenter:
        from transformers import AutoProcessor, CLIPSegForImageSegmentation

        place = resolve(folder, access=Access(token=token))
        processor = open_processor(AutoProcessor, place, "CLIPSeg")
        return cls(open_model(CLIPSegForImageSegmentation, place, "CLIPSeg"), processor)

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)

    def fingerprint(self) -> str:
        """SHA-256 of the weights."""
        return fingerprint(self.model)

    def maps(self, pictures: Float[Tensor, "b 3 h w"], lines: Sequence[str]) -> Float[Tensor, "b t u v"]:
        """For each text a map of the probability that it describes what is there, on the CPU."""
        pixels = prepared(pictures, self.processor.image_processor).to(self.model.device)
        limit = self.model.config.text_config.max_position_embeddings
        found = []
        for line in lines:
            tokens = self.processor(
                text=[line], padding="max_length", max_length=limit, truncation=True, return_tensors="pt"
            ).to(self.model.device)
            wanted = self.model.get_conditional_embeddings(batch_size=1, **tokens)
            logits = self.model(pixel_values=pixels, conditional_embeddings=wanted.expand(len(pixels), -1)).logits
            found.append(logits.view(len(pixels), *logits.shape[-2:]).sigmoid())
        maps = torch.stack(found, dim=1)
        cells = min(MOST_CELLS, maps.shape[-2]), min(MOST_CELLS, maps.shape[-1])
        return F.adaptive_avg_pool2d(maps, cells).cpu()
