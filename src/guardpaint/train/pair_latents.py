"""Encode pairs once into the latents that SFT, KTO and BCO train on: (z0, m, z̃0, input ids, y)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from guardpaint.data.pairs import Pair, PairStore, leaks
from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import write_tensors
from guardpaint.store.progress import track
from guardpaint.train.latents import encoded, fingerprint, pixels_of, tokenise


@dataclass(frozen=True)
class PairLatents:
    """The encoded pairs of one split."""

    source: Float[Tensor, "n c h w"]
    """z0 of the original picture."""
    target: Float[Tensor, "n c h w"]
    """z0 of its safe version; equal to `source` for safe pictures."""
    mask: Float[Tensor, "n 1 h w"]
    masked: Float[Tensor, "n c h w"]
    """z̃0: latents of the original picture with the masked area greyed out."""
    ids: Int[Tensor, "n l"]
    """Token ids of the original prompt."""
    category: Int[Tensor, " n"]
    """Index into the policy's categories; 0 is safe."""

    def __len__(self) -> int:
        return len(self.source)


def encode_pairs(store: PairStore, split: str, pipe: Any, policy: Policy, batch: int = 64) -> Path:
    """Encode the approved pairs of a split with the inpainter's autoencoder and tokenizer; returns the file.

    Held-out pairs that are also in the training split are left out.
    """
    rows = [p for p in store.rows(split) if p.approved is True]
    undecided = sum(p.approved is None for p in store.rows(split))
    seen = set() if split == "train" else set(leaks(store).get(split, []))
    rows = [p for p in rows if p.key not in seen]
    if not rows:
        raise BadInput(f"{store.root}: no approved pairs of split {split}; {undecided} await `guardpaint data review`")
    size = int(pipe.unet.config.sample_size) * pipe.vae_scale_factor
    parts: dict[str, list[Tensor]] = {f.name: [] for f in fields(PairLatents)}
    for start in track(range(0, len(rows), batch), f"latents {split}"):
        for name, value in encode_batch(store, rows[start : start + batch], pipe, policy, size).items():
            parts[name].append(value)
    path = store.root / f"latents-{split}.pt"
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    note = {"vae": fingerprint(pipe.vae), "left_out": len(seen), "undecided": undecided, "policy": policy.to_dict()}
    write_tensors(path, {"note": note, **tensors})
    return path


def encode_batch(store: PairStore, rows: list[Pair], pipe: Any, policy: Policy, size: int) -> dict[str, Tensor]:
    """The fields of `PairLatents` for some pairs."""

    def pixels(names: list[str]) -> Float[Tensor, "b 3 h w"]:
        images = [store.picture(n).convert("RGB").resize((size, size), Image.Resampling.LANCZOS) for n in names]
        return pixels_of([np.array(i) for i in images])

    holes = [store.picture(p.mask).convert("L").resize((size, size), Image.Resampling.NEAREST) for p in rows]
    hard = torch.from_numpy(np.stack([np.array(h) for h in holes]) > 127)[:, None]
    source = pixels([p.source for p in rows])
    z = encoded(pipe.vae, source)
    return {
        "source": z,
        "target": encoded(pipe.vae, pixels([p.target for p in rows])),
        "masked": encoded(pipe.vae, source * ~hard),
        "mask": torch.nn.functional.interpolate(hard.half(), z.shape[-2:]),
        "ids": tokenise(pipe.tokenizer, [p.prompt for p in rows]).to(torch.int32),
        "category": torch.tensor([policy.names.index(p.category) for p in rows]),
    }


def read_latents(path: Path) -> dict[str, Any]:
    """The content of a file of encoded pairs: a note and the fields of `PairLatents`."""
    try:
        tensors: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no encoded pairs; make them with `guardpaint data latents`") from error
    except Exception as error:
        raise BadCheckpoint(
            f"{path}: unreadable ({error}); delete it and run `guardpaint data latents` again"
        ) from error
    return tensors


def policy_of(folder: Path) -> Policy:
    """The policy that the training pairs were encoded with; the default one if their file is too old to tell."""
    path = folder / "latents-train.pt"
    note = read_latents(path)["note"]
    return Policy.from_dict(note["policy"], str(path)) if "policy" in note else Policy.default()


def load_pairs(folder: Path, split: str, vae: Any) -> PairLatents:
    """The encoded pairs of a split; raises BadCheckpoint if another autoencoder encoded them."""
    path = folder / f"latents-{split}.pt"
    tensors = read_latents(path)
    if tensors.pop("note")["vae"] != fingerprint(vae):
        raise BadCheckpoint(f"{path}: encoded by another autoencoder; run `guardpaint data latents` again")
    wide = {torch.float16: torch.float32, torch.int32: torch.int64}
    return PairLatents(**{name: value.to(wide.get(value.dtype, value.dtype)) for name, value in tensors.items()})


NEAR = 0.02
"""Two pictures are the same to `leaked` if their latents differ by less than this share of the latents' variance."""


def leaked(train: PairLatents, held_out: PairLatents) -> float:
    """Share of held-out pairs whose prompt, or nearly whose picture, is in the training set too."""
    prompts = {tuple(row) for row in train.ids.tolist()}
    same_prompt = torch.tensor([tuple(row) in prompts for row in held_out.ids.tolist()])
    own, other = held_out.source.flatten(1), train.source.flatten(1)
    limit = NEAR * own.var() * own.shape[1]
    nearest = torch.stack([((other - row) ** 2).sum(1).min() for row in own])
    return float((same_prompt | (nearest < limit)).float().mean())
