"""Pre-encoded scenes: latents, masks and token ids of a range of scene seeds, cached in one file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from rich.progress import track
from torch import Tensor

from guardpaint.checkpoint import write_atomic
from guardpaint.errors import BadCheckpoint
from guardpaint.world.captions import caption
from guardpaint.world.render import render
from guardpaint.world.scene import sample_scene


@dataclass(frozen=True)
class SceneLatents:
    """What a generator trains on."""

    latents: Float[Tensor, "n c h w"]
    """Scaled, fp16 in the file, fp32 here on access."""
    ids: Int[Tensor, "n k l"]
    """k captions per scene."""
    unsafe: Bool[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.latents)


def encode_scenes(
    vae: Any, tokenizer: Any, first: int, count: int, captions: int, cache: Path, batch: int = 64
) -> SceneLatents:
    """Render, encode and tokenise scenes; a finished cache of the same request is reused."""
    key = {"first": first, "count": count, "captions": captions, "scale": vae.config.scaling_factor}
    if cache.exists():
        try:
            kept = torch.load(cache, weights_only=True)
        except Exception as error:
            raise BadCheckpoint(f"{cache}: unreadable ({error}); delete it to encode anew") from error
        if kept["key"] == key:
            return SceneLatents(kept["latents"].float(), kept["ids"].long(), kept["unsafe"])
    latents, ids, unsafe = [], [], []
    for start in track(range(first, first + count, batch), description="encoding scenes"):
        scenes = [sample_scene(s) for s in range(start, min(start + batch, first + count))]
        images = np.stack([render(s).image for s in scenes])
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            raw = vae.encode(pixels.contiguous(memory_format=torch.channels_last)).latent_dist.mode()
        latents.append((raw * vae.config.scaling_factor).half().contiguous())
        texts = [caption(s, k).text for s in scenes for k in range(captions)]
        ids.append(tokenise(tokenizer, texts).view(len(scenes), captions, -1).to(torch.int16))
        unsafe.append(torch.tensor([s.category != "safe" for s in scenes]))
    made: dict[str, Any] = {
        "key": key,
        "latents": torch.cat(latents),
        "ids": torch.cat(ids),
        "unsafe": torch.cat(unsafe),
    }
    buffer = io.BytesIO()
    torch.save(made, buffer)
    write_atomic(cache, buffer.getvalue())
    return SceneLatents(made["latents"].float(), made["ids"].long(), made["unsafe"])


def tokenise(tokenizer: Any, texts: list[str]) -> Int[Tensor, "b l"]:
    """Padded and cut to the tokenizer's length, as the pipelines do."""
    return tokenizer(
        texts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids
