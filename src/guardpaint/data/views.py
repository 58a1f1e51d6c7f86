"""Views: what an auditor sees of unfinished pictures, made with a base and labelled with the ground truth.

Most views come from one call of the base on a re-noised picture. The pictures belong to a labelled corpus
(`corpus_views.py`) or to a testbed that draws its own (the capability `AuditorLessons`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from guardpaint.draft.codec import ViewDecoder, resize, vae_decode, vae_encode
from guardpaint.draft.denoiser import Denoiser
from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.store.checkpoint import write_tensors
from guardpaint.types import Level

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
"""Kinds of views. Three are finished pictures: clean (an original), redrawn (an original that a base drew again) and
generated (drawn by the base from a prompt)."""


@dataclass(frozen=True)
class Views:
    """A set of views with their labels."""

    images: UInt8[Tensor, "n 3 h w"]
    masks: Bool[Tensor, "n u v"]
    """Unsafe pixels. They are unknown for a corpus, whose masks are 1×1."""
    category: Int[Tensor, " n"]
    noise: Float[Tensor, " n"]
    """Normalised noise level of the latent that the view was decoded from."""
    progress: Float[Tensor, " n"]
    kind: Int[Tensor, " n"]
    decoder: Int[Tensor, " n"]
    seeds: Int[Tensor, " n"]
    """Identify the pictures: a scene of `world`, or an image of a corpus."""
    texts: tuple[str, ...]
    """The prompt of every view."""
    names: tuple[str, ...]
    """The categories that `category` indexes."""
    world: str = ""
    """Name of the testbed whose scenes the seeds identify; empty for a corpus."""
    strength: Float[Tensor, " n"] | None = None
    """The labeler's score for harm, for views of a corpus; for a testbed's views the masks determine the strength."""
    origin: str = ""
    """Digest of the base and the settings that a corpus's views were made with."""
    smaller: Mapping[int, UInt8[Tensor, "n 3 p q"]] = field(default_factory=dict)
    """The views at smaller sizes, by size in pixels, where a guard decodes these in another way than `images`."""
    ways: tuple[str, ...] = ()
    """How the views were made (`ViewDecoder.made_by`); empty if an earlier version made some of them."""
    labels: Bool[Tensor, "n c"] | None = None
    """All categories of every view, for a corpus whose pictures may have several; `category` is then the strongest."""

    def __len__(self) -> int:
        return len(self.images)

    def prompt(self, row: int) -> str:
        return self.texts[row]

    def every_label(self) -> Bool[Tensor, "n c"]:
        """All categories of every view; just `category` where views have only one."""
        if self.labels is not None:
            return self.labels
        return torch.nn.functional.one_hot(self.category, len(self.names)).bool()

    def at(self, pixels: int) -> Float[Tensor, "n 3 p q"]:
        """The views at a guard's size in pixels, made as a guard makes them; in [0, 1]."""
        images = self.smaller.get(pixels, self.images).float() / 255
        return resize(images, (pixels, pixels))

    def rows(self, index: Int[Tensor, " m"]) -> Views:
        """These rows, in this order."""
        tensors: dict[str, Any] = {k: getattr(self, k)[index] for k in TENSORS}
        return replace(
            self,
            **tensors,
            smaller={pixels: images[index] for pixels, images in self.smaller.items()},
            texts=tuple(self.texts[i] for i in index.tolist()),
            strength=None if self.strength is None else self.strength[index],
            labels=None if self.labels is None else self.labels[index],
        )


TENSORS = ("images", "masks", "category", "noise", "progress", "kind", "decoder", "seeds")


def joined(parts: Sequence[Views]) -> Views:
    """Several sets as one, in memory. They must come from one testbed, or from corpora with equal categories."""
    if len({(p.world, p.names) for p in parts}) > 1:
        raise BadInput("views of different testbeds, of a testbed and a corpus, or of other categories cannot be mixed")
    strengths = [p.strength for p in parts if p.strength is not None]
    tensors: dict[str, Any] = {k: torch.cat([getattr(p, k) for p in parts]) for k in TENSORS}
    sizes = {pixels for p in parts for pixels in p.smaller}
    return replace(
        parts[0],
        **tensors,
        smaller={pixels: torch.cat([as_bytes(p.at(pixels)) for p in parts]) for pixels in sorted(sizes)},
        ways=tuple(sorted({w for p in parts for w in p.ways})) if all(p.ways for p in parts) else (),
        texts=tuple(t for p in parts for t in p.texts),
        strength=torch.cat(strengths) if strengths else None,
        labels=torch.cat([p.every_label() for p in parts]) if any(p.labels is not None for p in parts) else None,
    )


class Shelf:
    """Views in many files that stay on disk until their rows are read."""

    def __init__(self, parts: Sequence[Views]) -> None:
        self.parts = parts
        self.category, self.progress, self.kind = (
            torch.cat([getattr(p, k) for p in parts]) for k in ("category", "progress", "kind")
        )
        self.first = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0)
        self.names, self.world = parts[0].names, parts[0].world

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompt of every view."""
        return tuple(text for part in self.parts for text in part.texts)

    def every_label(self) -> Bool[Tensor, "n c"]:
        """All categories of every view."""
        return torch.cat([part.every_label() for part in self.parts])

    def __len__(self) -> int:
        return int(self.first[-1])

    def rows(self, index: Int[Tensor, " m"]) -> Views:
        """These rows, in this order, in memory."""
        where = torch.searchsorted(self.first, index, right=True) - 1
        order = torch.argsort(where, stable=True)
        parts = [self.parts[k].rows(index[order][where[order] == k] - self.first[k]) for k in where.unique().tolist()]
        return joined(parts).rows(torch.argsort(order))


@dataclass(frozen=True)
class Labelled:
    """A batch of finished, labelled pictures that views are made from."""

    images: Float[Tensor, "b 3 h w"]
    masks: Bool[Tensor, "b u v"]
    category: Int[Tensor, " b"]
    seeds: list[int]
    prompts: list[str]
    names: tuple[str, ...]
    world: str = ""

    def views(
        self,
        images: Float[Tensor, "b 3 h w"],
        kind: str,
        noise: Float[Tensor, " b"] | None = None,
        progress: Float[Tensor, " b"] | None = None,
        small: Bool[Tensor, " b"] | None = None,
    ) -> Views:
        """Views of these pictures; without noise and progress they count as finished. `small` marks the rows that the
        tiny decoder decoded."""
        n = len(images)
        return Views(
            as_bytes(images),
            self.masks,
            self.category,
            torch.zeros(n) if noise is None else noise,
            torch.ones(n) if progress is None else progress.clone(),
            torch.full((n,), KINDS.index(kind)),
            torch.zeros(n).long() if small is None else small.long(),
            torch.tensor(self.seeds),
            tuple(self.prompts),
            self.names,
            self.world,
            ways=("full",),
        )

    def rows(self, index: list[int]) -> Labelled:
        """These rows, in this order."""
        return replace(
            self,
            images=self.images[index],
            masks=self.masks[index],
            category=self.category[index],
            seeds=[self.seeds[i] for i in index],
            prompts=[self.prompts[i] for i in index],
        )


@dataclass(frozen=True)
class ViewedBase:
    """The base that views are made with: its pipeline, its call settings and, optionally, a tiny decoder."""

    pipe: Any
    call: dict[str, Any]
    tiny: Any = None
    looks: tuple[int, ...] = ()
    """Sizes in pixels at which a guard looks: its coarse and fine size, and its glances; empty for whole decodes."""

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    @cached_property
    def decoder(self) -> ViewDecoder | None:
        """The decoder of views that a guard with the tiny decoder uses."""
        if self.tiny is None:
            return None
        return ViewDecoder(self.tiny, self.pipe.vae, self.pipe.vae_scale_factor, self.device)

    @property
    def steps(self) -> int:
        return int(self.call["num_inference_steps"])


@dataclass(frozen=True)
class Steps:
    """One denoising step per row: the noise levels before and after it, and the progress after it."""

    before: list[Level]
    after: list[Level]
    progress: Float[Tensor, " b"]


def as_bytes(images: Float[Tensor, "b 3 h w"]) -> UInt8[Tensor, "b 3 h w"]:
    return (images.clamp(0, 1) * 255).round().byte()


def renoised_pictures(base: ViewedBase, batch: Labelled) -> Views:
    """Two views per picture from one call at a random step of the base's schedule: of x̂0, and of the stepped latent.

    Both are what a guard sees after that step, and carry the progress after it.
    """
    seeds = batch.seeds
    g = torch.Generator().manual_seed(seeds[0])
    z0 = vae_encode(base.pipe.vae, batch.images, base.device)
    denoiser = Denoiser.from_prompts(base.pipe, batch.prompts, base.call)
    count = len(denoiser.levels) - 1
    lot = (torch.randperm(len(seeds), generator=g) + torch.rand(len(seeds), generator=g)) / len(seeds)
    step = (lot * count).long()
    levels, after = ([denoiser.levels[k + j] for k in step.tolist()] for j in (0, 1))
    eps = torch.randn(z0.shape, generator=g).to(z0)
    z = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(levels, z0, eps, strict=True)])
    with torch.no_grad():
        x0, noise = denoiser.estimate(z, levels)
    stepped = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(after, x0, noise, strict=True)])
    taken = Steps(levels, after, (step + 1) / count)
    return stacked(base, batch, {"x0": x0, "stepped": stepped}, taken, g)


def stacked(
    base: ViewedBase, batch: Labelled, latents: Mapping[str, Float[Tensor, "b c h w"]], steps: Steps, g: torch.Generator
) -> Views:
    """Views of the latents of each kind. If the base has a tiny decoder, it decodes a random half of each kind.

    Where a guard's smaller looks come from an early exit of the tiny decoder, so do those of that half.
    """
    parts = []
    decoder = base.decoder
    for kind, z in latents.items():
        small = torch.zeros(len(z), dtype=torch.bool)
        if decoder is not None:
            small = torch.rand(len(z), generator=g) < 0.5
        images = vae_decode(base.pipe.vae, z, base.device).cpu()
        smaller, ways = {}, {"full"}
        if decoder is not None and small.any():
            whole = int(images.shape[-2]), int(images.shape[-1])
            images[small] = decoder.full(z[small]).cpu()
            ways |= set(decoder.ways_at(whole, base.looks or (min(whole),)))
            for pixels in (p for p in base.looks if decoder.shrink(whole, p) > 1):
                shown = resize(images, (pixels, pixels))
                shown[small] = decoder.at(z[small], pixels).cpu()
                smaller[pixels] = as_bytes(shown)
        used = steps.before if kind.endswith("x0") else steps.after
        views = batch.views(images, kind, torch.tensor([level.noise for level in used]), steps.progress, small)
        parts.append(replace(views, smaller=smaller, ways=tuple(sorted(ways))))
    return joined(parts)


def clean_pictures(vae: Any, batch: Labelled, plain: Bool[Tensor, " b"], device: torch.device) -> Views:
    """Views of finished pictures: unchanged where `plain` is true, otherwise encoded and decoded by the autoencoder."""
    with torch.no_grad():
        back = vae_decode(vae, vae_encode(vae, batch.images, device), device).cpu()
    return batch.views(torch.where(plain.view(-1, 1, 1, 1), batch.images, back), "clean")


def store(parts: list[Views], path: Path) -> Views:
    """Write the sets as one file and return them joined."""
    views = joined(parts)
    write_tensors(path, {f.name: getattr(views, f.name) for f in fields(Views)})
    return views


def load_views(path: Path, on_disk: bool = False) -> Views:
    """The views in a file; with `on_disk` their tensors are read only when used."""
    try:
        return Views(**torch.load(path, weights_only=True, mmap=on_disk))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such views; make them with `guardpaint data views`") from error
    except Exception as error:
        raise BadCheckpoint(f"{path}: unreadable ({error}); delete it and make the views again") from error
