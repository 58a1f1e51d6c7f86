"""What an auditor sees of unfinished pictures: views made with a base, and the ground truth of what they show.

Most come from one call of the base on a re-noised picture of a labelled corpus (`corpus_views.py`) or of a testbed that
draws its own pictures (the capability `AuditorLessons`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from guardpaint.draft import schedule
from guardpaint.draft.codec import ViewDecoder, vae_decode, vae_encode
from guardpaint.draft.conditioning import guided
from guardpaint.draft.families import family_of
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
"""Kinds of views. clean, redrawn and generated are finished pictures: originals, originals that a base drew anew, and
pictures that the base drew from a prompt."""


@dataclass(frozen=True)
class Views:
    """A set of views with their labels."""

    images: UInt8[Tensor, "n 3 h w"]
    masks: Bool[Tensor, "n u v"]
    """Unsafe pixels; they are not known for a corpus, whose masks are 1×1."""
    category: Int[Tensor, " n"]
    noise: Float[Tensor, " n"]
    """Normalised noise of the latent behind the view."""
    progress: Float[Tensor, " n"]
    kind: Int[Tensor, " n"]
    decoder: Int[Tensor, " n"]
    seeds: Int[Tensor, " n"]
    """Identify the pictures: a scene of `world`, or an image of a corpus."""
    texts: tuple[str, ...]
    """The prompt of every view."""
    names: tuple[str, ...]
    """What the numbers in `category` mean."""
    world: str = ""
    """Name of the testbed whose scenes the seeds identify; empty for a corpus."""
    strength: Float[Tensor, " n"] | None = None
    """How sure a corpus's labeler is of harm. For a testbed's views the masks say how strong it is."""
    origin: str = ""
    """Digest of the base and the settings that a corpus's views were made with."""

    def __len__(self) -> int:
        return len(self.images)

    def prompt(self, row: int) -> str:
        return self.texts[row]

    def rows(self, index: Int[Tensor, " m"]) -> Views:
        """These rows, in this order."""
        tensors: dict[str, Any] = {k: getattr(self, k)[index] for k in TENSORS}
        return replace(
            self,
            **tensors,
            texts=tuple(self.texts[i] for i in index.tolist()),
            strength=None if self.strength is None else self.strength[index],
        )


TENSORS = ("images", "masks", "category", "noise", "progress", "kind", "decoder", "seeds")


def joined(parts: Sequence[Views]) -> Views:
    """Several sets as one, in memory. They must come from the same testbed or from corpora with equal categories."""
    if len({(p.world, p.names) for p in parts}) > 1:
        raise BadInput("views of different testbeds, of a testbed and a corpus, or of other categories cannot be mixed")
    strengths = [p.strength for p in parts if p.strength is not None]
    tensors: dict[str, Any] = {k: torch.cat([getattr(p, k) for p in parts]) for k in TENSORS}
    return replace(
        parts[0],
        **tensors,
        texts=tuple(t for p in parts for t in p.texts),
        strength=torch.cat(strengths) if strengths else None,
    )


class Shelf:
    """Views of many files that stay on disk until some of their rows are asked for."""

    def __init__(self, parts: Sequence[Views]) -> None:
        self.parts = parts
        self.category, self.progress, self.kind = (
            torch.cat([getattr(p, k) for p in parts]) for k in ("category", "progress", "kind")
        )
        self.first = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0)
        self.names, self.world = parts[0].names, parts[0].world

    def __len__(self) -> int:
        return int(self.first[-1])

    def rows(self, index: Int[Tensor, " m"]) -> Views:
        """These rows, in this order, in memory."""
        where = torch.searchsorted(self.first, index, right=True) - 1
        order = torch.argsort(where, stable=True)
        found = [self.parts[k].rows(index[order][where[order] == k] - self.first[k]) for k in where.unique().tolist()]
        return joined(found).rows(torch.argsort(order))


@dataclass(frozen=True)
class Labelled:
    """A batch of finished pictures with their labels: what views are made of."""

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
        """Views of these pictures; without noise and progress they are finished. `small` marks the rows that went
        through the tiny decoder."""
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
    """A base whose unfinished pictures are viewed: its pipeline, call settings and tiny decoder, if it has one."""

    pipe: Any
    call: dict[str, Any]
    tiny: Any = None

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    @property
    def steps(self) -> int:
        return int(self.call["num_inference_steps"])


@dataclass(frozen=True)
class Steps:
    """One step of each row: the levels it goes from and to, and the progress that a guard counts after it."""

    before: list[Level]
    after: list[Level]
    progress: Float[Tensor, " b"]


class Begun(Exception):
    """A pipeline has come to its first denoiser call, which is as far as a replay needs it."""


class Replay:
    """A base's denoiser on any latents and levels, with the text of one batch of prompts under its own guidance."""

    def __init__(self, pipe: Any, call: dict[str, Any], prompts: list[str]) -> None:
        self.pipe, self.family = pipe, family_of(pipe)
        self.scheduler = pipe.scheduler
        self.module = getattr(pipe, self.family.denoiser)
        self.kwargs: dict[str, Any] = {}
        self.scale = float(call.get("guidance_scale", 1.0))

        def remember(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            self.kwargs = {k: v for k, v in kwargs.items() if k not in ("sample", "hidden_states", "timestep")}
            self.rows = len(args[0] if args else kwargs["hidden_states"])
            raise Begun

        hook = self.module.register_forward_pre_hook(remember, with_kwargs=True)
        try:
            pipe(prompts, generator=torch.Generator().manual_seed(0), **call)
        except Begun:
            pass
        finally:
            hook.remove()
        self.branches = self.rows // len(prompts)
        self.steps = int(call["num_inference_steps"])
        walked = schedule.Levels(self.scheduler, self.steps)
        walked.locate(self.scheduler.timesteps[0])
        self.levels = [walked.at(k) for k in range(self.steps + 1)]
        """What each step of the call enters with, and what the last one leaves."""

    @torch.no_grad()
    def estimate(
        self, z: Float[Tensor, "b c h w"], levels: list[Any]
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c h w"]]:
        """Clean estimates and implied noise, every row at its own level."""
        prediction = schedule.prediction_type(self.scheduler)
        noise = torch.tensor([level.noise for level in levels], device=z.device)
        sample = self.family.pack(torch.cat([z] * self.branches)).to(self.module.dtype)
        if prediction == "flow":
            time = (noise * (1.0 if self.family.name == "flux" else 1000.0)).repeat(self.branches)
            out = self.module(hidden_states=sample, timestep=time, **self.kwargs)[0]
        elif schedule.parametrisation(self.scheduler) == "sigmas_ve":
            unit = torch.tensor([math.hypot(level.signal, level.sigma) for level in levels], device=z.device)
            scaled = sample / unit.repeat(self.branches).view(-1, 1, 1, 1).to(sample)
            time = (noise * self.scheduler.config.num_train_timesteps).repeat(self.branches)
            out = self.module(scaled, time, **self.kwargs)[0]
        else:
            steps = (noise * self.scheduler.config.num_train_timesteps).round().long().clamp(max=999)
            out = self.module(sample, steps.repeat(self.branches), **self.kwargs)[0]
        out = self.family.unpack(out.float(), (int(z.shape[-2]), int(z.shape[-1])))
        if self.branches == 2:
            out = guided(out, self.scale, out.dim())
        pairs = [schedule.split(o, x, level, prediction) for o, x, level in zip(out, z, levels, strict=True)]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def as_bytes(images: Float[Tensor, "b 3 h w"]) -> UInt8[Tensor, "b 3 h w"]:
    return (images.clamp(0, 1) * 255).round().byte()


def renoised_pictures(base: ViewedBase, batch: Labelled) -> Views:
    """One call per picture at a random step of the base's own schedule: its x̂0 view, and that of the stepped latent.

    Both are what a guard sees once that step is done, and carry the progress it then counts.
    """
    seeds = batch.seeds
    g = torch.Generator().manual_seed(seeds[0])
    z0 = vae_encode(base.pipe.vae, batch.images, base.device)
    replay = Replay(base.pipe, base.call, batch.prompts)
    lot = (torch.randperm(len(seeds), generator=g) + torch.rand(len(seeds), generator=g)) / len(seeds)
    step = (lot * replay.steps).long()
    levels, after = ([replay.levels[k + j] for k in step.tolist()] for j in (0, 1))
    eps = torch.randn(z0.shape, generator=g).to(z0)
    z = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(levels, z0, eps, strict=True)])
    x0, noise = replay.estimate(z, levels)
    stepped = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(after, x0, noise, strict=True)])
    taken = Steps(levels, after, (step + 1) / replay.steps)
    return stacked(base, batch, {"x0": x0, "stepped": stepped}, taken, g)


def stacked(
    base: ViewedBase, batch: Labelled, latents: Mapping[str, Float[Tensor, "b c h w"]], steps: Steps, g: torch.Generator
) -> Views:
    """Views of latents by kind. If the base has a tiny decoder, it decodes a random half of each kind."""
    parts = []
    for kind, z in latents.items():
        small = torch.zeros(len(z), dtype=torch.bool)
        if base.tiny is not None:
            small = torch.rand(len(z), generator=g) < 0.5
        images = vae_decode(base.pipe.vae, z, base.device).cpu()
        if small.any():
            decoder = ViewDecoder(base.tiny, base.pipe.vae, base.pipe.vae_scale_factor, base.device)
            images[small] = decoder.full(z[small]).cpu()
        used = steps.before if kind.endswith("x0") else steps.after
        parts.append(batch.views(images, kind, torch.tensor([level.noise for level in used]), steps.progress, small))
    return joined(parts)


def clean_pictures(vae: Any, batch: Labelled, plain: Bool[Tensor, " b"], device: torch.device) -> Views:
    """Finished pictures: as they are where `plain` says so, else once through the autoencoder."""
    with torch.no_grad():
        back = vae_decode(vae, vae_encode(vae, batch.images, device), device).cpu()
    return batch.views(torch.where(plain.view(-1, 1, 1, 1), batch.images, back), "clean")


def store(parts: list[Views], path: Path) -> Views:
    """Write the sets as one file; returns them joined."""
    whole = joined(parts)
    write_tensors(path, {f.name: getattr(whole, f.name) for f in fields(Views)})
    return whole


def load_views(path: Path, on_disk: bool = False) -> Views:
    """Views of a file; with `on_disk` their tensors are read when they are used."""
    try:
        kept = torch.load(path, weights_only=True, mmap=on_disk)
        return Views(**kept)
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such views; make them with `guardpaint data views`") from error
    except Exception as error:
        raise BadCheckpoint(f"{path}: unreadable ({error}); delete it to make it anew") from error
