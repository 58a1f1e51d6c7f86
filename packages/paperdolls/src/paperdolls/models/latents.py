"""Pre-encoded scenes: latents, masks and token ids of a range of scene seeds, cached in one file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import write_tensors
from guardpaint.store.progress import track
from guardpaint.train.latents import encoded, fingerprint, pixels_of, tokenise
from paperdolls.captions import caption
from paperdolls.masks import training_mask
from paperdolls.render import render
from paperdolls.scene import sample_scene


@dataclass(frozen=True)
class SceneLatents:
    """The encoded scenes that a generator trains on."""

    latents: Float[Tensor, "n c h w"]
    """Scaled latents; fp16 in the file, fp32 here."""
    ids: Int[Tensor, "n k l"]
    """Token ids of k captions per scene."""
    unsafe: Bool[Tensor, " n"]
    other_ids: Int[Tensor, "n k m"] | None = None
    """The captions in a second tokenizer."""
    masks: Float[Tensor, "n v 1 h w"] | None = None
    """v training masks per scene, at latent size."""
    masked: Float[Tensor, "n v c h w"] | None = None
    """Latents of the scene with each mask greyed out."""

    def __len__(self) -> int:
        return len(self.latents)


WRITE_EVERY = 50
"""Batches of scenes after which the cache is written."""


@dataclass(frozen=True)
class SceneRange:
    """Which scenes to encode, and how much of each."""

    first: int
    """Seed of the first scene."""
    count: int
    captions: int = 1
    """Captions per scene."""
    masks: int = 0
    """Training masks per scene; 0 for models that do not inpaint."""


def encode_scenes(
    vae: Any, tokenizer: Any, wanted: SceneRange, cache: Path, *, other_tokenizer: Any = None, batch: int = 64
) -> SceneLatents:
    """Render, encode and tokenise scenes. A cache of the same scenes, autoencoder and tokenizers is reused.

    The scenes are drawn at the size of the autoencoder's pictures (`sample_size` in its config). The cache is written
    as the encoding goes on, so that an interrupted one resumes.
    """
    side = int(vae.config.sample_size)
    first, count, captions, masks = wanted.first, wanted.count, wanted.captions, wanted.masks
    key: dict[str, Any] = {"first": first, "count": count, "captions": captions, "masks": masks}
    lengths = [(len(t), t.model_max_length) for t in (tokenizer, other_tokenizer) if t is not None]
    key |= {"vae": fingerprint(vae), "texts": lengths}
    parts: dict[str, list[Tensor]] = {f.name: [] for f in fields(SceneLatents)}
    done = 0
    if cache.exists():
        try:
            kept = torch.load(cache, weights_only=True)
        except Exception as error:
            raise BadCheckpoint(f"{cache}: unreadable ({error}); delete it to encode the scenes again") from error
        if kept.pop("key") == key:
            done = len(kept["latents"])
            parts |= {name: [value] for name, value in kept.items()}
    starts = range(first + done, first + count, batch)
    for k, start in enumerate(track(starts, "encoding scenes")):
        scenes = [sample_scene(s) for s in range(start, min(start + batch, first + count))]
        pixels = pixels_of([render(s, side).image for s in scenes])
        parts["latents"].append(encoded(vae, pixels))
        texts = [caption(s, k).text for s in scenes for k in range(captions)]
        parts["ids"].append(tokenise(tokenizer, texts).view(len(scenes), captions, -1).to(torch.int16))
        if other_tokenizer is not None:
            ids = tokenise(other_tokenizer, texts).view(len(scenes), captions, -1)
            parts["other_ids"].append(ids.to(torch.int16))
        parts["unsafe"].append(torch.tensor([s.category != "safe" for s in scenes]))
        if masks:
            holes = torch.from_numpy(np.stack([training_mask(s, k, side) for s in scenes for k in range(masks)]))
            grey = pixels.repeat_interleave(masks, 0) * ~holes[:, None]
            z = encoded(vae, grey)
            small = torch.nn.functional.interpolate(holes[:, None].half(), z.shape[-2:])
            parts["masked"].append(z.view(len(scenes), masks, *z.shape[1:]))
            parts["masks"].append(small.view(len(scenes), masks, *small.shape[1:]))
        if k % WRITE_EVERY == WRITE_EVERY - 1 or k == len(starts) - 1:
            parts = {name: [torch.cat(values)] if values else [] for name, values in parts.items()}
            write_tensors(cache, {"key": key, **{name: values[0] for name, values in parts.items() if values}})
    return widened({name: values[0] for name, values in parts.items() if values})


def widened(parts: dict[str, Tensor]) -> SceneLatents:
    """The stored tensors in the types that training uses."""
    wide = {torch.float16: torch.float32, torch.int16: torch.int64}
    return SceneLatents(**{name: value.to(wide.get(value.dtype, value.dtype)) for name, value in parts.items()})
