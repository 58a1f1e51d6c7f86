"""CLIP and SigLIP behind one face: pictures, texts and single patches as unit vectors of one space."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.inputs import prepared
from guardpaint.errors import BadCheckpoint

FAMILIES = ("clip", "siglip")
REMEMBERED = 256


class DualEncoder:
    """A model of transformers that embeds pictures and texts alike."""

    def __init__(self, model: Any, processor: Any) -> None:
        if model.config.model_type not in FAMILIES:
            raise BadCheckpoint(
                f"{model.config.model_type!r} checkpoint: zero-shot audits need {' or '.join(FAMILIES)}"
            )
        self.model, self.processor = model.eval().requires_grad_(False), processor
        self.scale = float(model.logit_scale.detach().exp())
        self._texts: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def pixels(self, pictures: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 u v"]:
        return prepared(pictures, self.processor.image_processor).to(self.model.device)

    def images(self, pixels: Float[Tensor, "b 3 u v"]) -> Float[Tensor, "b d"]:
        """Embeddings of pictures."""
        return F.normalize(pooled(self.model.get_image_features(pixel_values=pixels)), dim=-1)

    def texts(self, lines: Sequence[str]) -> Float[Tensor, "t d"]:
        """Embeddings of texts; each is encoded once and remembered. Words beyond the model's limit are cut."""
        with self._lock:
            known = {t: self._texts[t] for t in lines if t in self._texts}
        for line in dict.fromkeys(t for t in lines if t not in known):
            tokens = self.processor(
                text=[line],
                padding="max_length",
                max_length=self.model.config.text_config.max_position_embeddings,
                truncation=True,
                return_tensors="pt",
            ).to(self.model.device)
            known[line] = F.normalize(pooled(self.model.get_text_features(**tokens)), dim=-1)[0]
        with self._lock:
            self._texts.update(known)
            while len(self._texts) > REMEMBERED:
                self._texts.popitem(last=False)
        return torch.stack([known[t] for t in lines])

    def patches(self, pixels: Float[Tensor, "b 3 u v"]) -> Float[Tensor, "b g k d"]:
        """Embeddings of single patches: the last layer and the pooling see each patch as if it were alone."""
        vision = self.model.vision_model
        states = vision(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
        patch = vision.config.patch_size
        grid = int(pixels.shape[-2]) // patch, int(pixels.shape[-1]) // patch
        states = states[:, states.shape[1] - grid[0] * grid[1] :]
        alone = vision.encoder.layers[-1](states.flatten(0, 1)[:, None], None)
        alone = vision.post_layernorm(alone)
        if self.model.config.model_type == "siglip":
            vectors = vision.head(alone)
        else:
            vectors = self.model.visual_projection(alone[:, 0])
        return F.normalize(vectors, dim=-1).unflatten(0, (len(pixels), *grid))

    def to(self, device: Any) -> None:
        before = self.model.device
        self.model.to(device)
        if self.model.device != before:
            with self._lock:
                self._texts.clear()


def pooled(out: Any) -> Tensor:
    """The embedding in what `get_image_features` returns, which some versions of transformers wrap."""
    return out if isinstance(out, Tensor) else out.pooler_output
