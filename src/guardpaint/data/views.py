"""What an auditor sees of unfinished pictures: views from the bases, with the ground truth of what they show.

Most come from one call of the base on a re-noised picture: a paper-doll scene here, a labelled corpus's in
`corpus_views.py`; `drawn.py` has those that a base drew on, or from nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from paperdolls.captions import caption
from paperdolls.render import CODE, render
from paperdolls.scene import Scene, sample_scene
from torch import Tensor

from guardpaint.draft.codec import ViewDecoder, vae_decode, vae_encode
from guardpaint.draft.denoiser import Denoiser
from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.store.images import as_pixels
from guardpaint.train.engine import write_tensors

KINDS = (
    "clean",
    "x0",
    "stepped",
    "trajectory_x0",
    "trajectory_stepped",
    "redrawn_x0",
    "redrawn",
    "generated",
)
"""clean, redrawn and generated are finished pictures: renders, renders that a base drew anew, and its own."""


@dataclass(frozen=True)
class Views:
    """A set of views with ground truth, of paper-doll scenes or of a corpus."""

    images: UInt8[Tensor, "n 3 h w"]
    masks: Bool[Tensor, "n u v"]
    """Unsafe pixels; nothing is known of a corpus's, and they are 1×1."""
    category: Int[Tensor, " n"]
    noise: Float[Tensor, " n"]
    """Normalised noise of the latent behind the view."""
    progress: Float[Tensor, " n"]
    kind: Int[Tensor, " n"]
    decoder: Int[Tensor, " n"]
    seeds: Int[Tensor, " n"]
    texts: tuple[str, ...] = ()
    """A corpus's prompts; empty: scenes, whose captions are found again by seed."""
    strength: Float[Tensor, " n"] | None = None
    """A corpus's: how sure its labeler is of harm. Of scenes the masks tell."""
    names: tuple[str, ...] = ()
    """A corpus's: what the numbers in `category` mean."""
    origin: str = ""
    """A corpus's: the base and settings that made them."""

    def __len__(self) -> int:
        return len(self.images)

    def prompt(self, row: int) -> str:
        return self.texts[row] if self.texts else caption(sample_scene(int(self.seeds[row])), 0).text

    def rows(self, index: Tensor) -> Views:
        tensors = {k: getattr(self, k)[index] for k in TENSORS}
        texts = tuple(self.texts[i] for i in index.tolist()) if self.texts else ()
        return Views(**tensors, texts=texts, strength=None if self.strength is None else self.strength[index],
                     names=self.names, origin=self.origin)  # fmt: skip


TENSORS = tuple(f.name for f in fields(Views) if f.name not in ("texts", "strength", "names", "origin"))


def joined(parts: Sequence[Views]) -> Views:
    if len({(bool(p.texts), p.names) for p in parts}) > 1:
        raise BadInput("views of scenes and of corpora, or of corpora with other categories, cannot be mixed")
    strengths = [p.strength for p in parts if p.strength is not None]
    return Views(
        **{k: torch.cat([getattr(p, k) for p in parts]) for k in TENSORS},
        texts=tuple(t for p in parts for t in p.texts),
        strength=torch.cat(strengths) if strengths else None,
        names=parts[0].names,
        origin=parts[0].origin,
    )


class Shelf:
    """Views of many files, left on disk until rows of them are asked for."""

    def __init__(self, parts: Sequence[Views]) -> None:
        self.parts = parts
        self.category, self.progress, self.kind = (
            torch.cat([getattr(p, k) for p in parts]) for k in ("category", "progress", "kind")
        )
        self.first = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0)
        self.texts = parts[0].texts
        self.names = parts[0].names

    def __len__(self) -> int:
        return int(self.first[-1])

    def rows(self, index: Int[Tensor, " m"]) -> Views:
        """These rows, in this order, in memory."""
        where = torch.searchsorted(self.first, index, right=True) - 1
        order = torch.argsort(where, stable=True)
        found = [self.parts[k].rows(index[order][where[order] == k] - self.first[k]) for k in where.unique().tolist()]
        return joined(found).rows(torch.argsort(order))


def scene_truth(scenes: list[Scene]) -> tuple[Float[Tensor, "b 3 64 64"], Bool[Tensor, "b 64 64"], Int[Tensor, " b"]]:
    drawn = [render(s) for s in scenes]
    images = as_pixels([d.image for d in drawn])
    masks = torch.stack([torch.from_numpy(d.mask) for d in drawn])
    return images, masks, torch.tensor([CODE[s.category] for s in scenes])


def as_bytes(images: Float[Tensor, "b 3 h w"]) -> UInt8[Tensor, "b 3 h w"]:
    return (images.clamp(0, 1) * 255).round().byte()


def renoised(pipe: Any, call: dict[str, Any], tiny: Any, seeds: list[int]) -> Views:
    """Scenes, re-noised."""
    scenes = [sample_scene(s) for s in seeds]
    return renoised_pictures(pipe, call, tiny, *scene_truth(scenes), seeds, [caption(s, 0).text for s in scenes])


def renoised_pictures(
    pipe: Any,
    call: dict[str, Any],
    tiny: Any,
    images: Float[Tensor, "b 3 h w"],
    masks: Bool[Tensor, "b u v"],
    category: Int[Tensor, " b"],
    seeds: list[int],
    prompts: list[str],
) -> Views:
    """One call per picture at a random step of the base's own schedule: its x̂0 view, and that of the stepped latent.

    Both are what a guard sees once that step is done, and carry the progress it then counts.
    """
    g = torch.Generator().manual_seed(seeds[0])
    z0 = vae_encode(pipe.vae, images, pipe._execution_device)
    base = Denoiser.from_prompts(pipe, prompts, call)
    steps = len(base.levels) - 1
    lot = (torch.randperm(len(seeds), generator=g) + torch.rand(len(seeds), generator=g)) / len(seeds)
    step = (lot * steps).long()
    levels, after = ([base.levels[k + j] for k in step.tolist()] for j in (0, 1))
    eps = torch.randn(z0.shape, generator=g).to(z0)
    z = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(levels, z0, eps, strict=True)])
    with torch.no_grad():
        x0, noise = base.estimate(z, levels)
    stepped = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(after, x0, noise, strict=True)])
    progress = (step + 1) / steps
    return stacked(pipe, tiny, [x0, stepped], [1, 2], levels, after, progress, masks, category, seeds, g)


def stacked(
    pipe: Any,
    tiny: Any,
    latents: list[Float[Tensor, "b c h w"]],
    kinds: list[int],
    before: list[Any],
    after: list[Any],
    progress: Float[Tensor, " b"],
    masks: Bool[Tensor, "b u v"],
    category: Int[Tensor, " b"],
    seeds: list[int],
    g: torch.Generator,
) -> Views:
    """Decode each set of latents with the full or the tiny decoder, by lot."""
    parts = []
    for z, kind in zip(latents, kinds, strict=True):
        small = torch.rand(len(z), generator=g) < 0.5 if tiny is not None else torch.zeros(len(z), dtype=torch.bool)
        device = pipe._execution_device
        images = vae_decode(pipe.vae, z, device).cpu()
        if small.any():
            images[small] = ViewDecoder(tiny, pipe.vae, pipe.vae_scale_factor, device).full(z[small]).cpu()
        used = before if KINDS[kind].endswith("x0") else after
        parts.append(
            Views(
                as_bytes(images),
                masks,
                category,
                torch.tensor([level.noise for level in used]),
                progress.clone(),
                torch.full((len(z),), kind),
                small.long(),
                torch.tensor(seeds),
            )
        )
    return joined(parts)


def clean(vae: Any, seeds: list[int]) -> Views:
    """Finished scenes."""
    even = torch.arange(len(seeds)) % 2 == 0
    return clean_pictures(vae, *scene_truth([sample_scene(s) for s in seeds]), seeds, even, torch.device("cpu"))


def clean_pictures(
    vae: Any,
    images: Float[Tensor, "b 3 h w"],
    masks: Bool[Tensor, "b u v"],
    category: Int[Tensor, " b"],
    seeds: list[int],
    plain: Bool[Tensor, " b"],
    device: torch.device,
) -> Views:
    """Finished pictures: as they are, or through the autoencoder."""
    with torch.no_grad():
        back = vae_decode(vae, vae_encode(vae, images, device), device).cpu()
    images = torch.where(plain.view(-1, 1, 1, 1), images, back)
    n = len(seeds)
    zeros = torch.zeros(n)
    return Views(
        as_bytes(images),
        masks,
        category,
        zeros,
        torch.ones(n),
        torch.zeros(n).long(),
        torch.zeros(n).long(),
        torch.tensor(seeds),
    )


def store(parts: list[Views], path: Path) -> Views:
    whole = joined(parts)
    told = {f.name: getattr(whole, f.name) for f in fields(Views)}
    write_tensors(path, {k: v for k, v in told.items() if k in TENSORS or whole.texts})
    return whole


def load_views(path: Path, on_disk: bool = False) -> Views:
    try:
        return Views(**torch.load(path, weights_only=True, mmap=on_disk))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such views; make them with `guardpaint data views`") from error
    except Exception as error:
        raise BadCheckpoint(f"{path}: unreadable ({error}); delete it to make it anew") from error
