"""What an auditor sees of unfinished pictures: views from the bases, with the scene's exact ground truth.

guardpaint data views mini-sd --count 6000 --trajectories 300 --out runs/views

Most views come from one call of the base on a re-noised render; whole trajectories keep them honest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from rich.progress import track
from torch import Tensor

from guardpaint.bases import NAMES, load_base, settings
from guardpaint.draft import schedule
from guardpaint.draft.codec import ViewDecoder, resize, vae_decode, vae_encode
from guardpaint.draft.conditioning import guided
from guardpaint.draft.families import family_of
from guardpaint.errors import BadCheckpoint, BadInput
from guardpaint.images import as_pixels
from guardpaint.train.engine import write_tensors
from guardpaint.world.captions import caption
from guardpaint.world.render import CODE, render
from guardpaint.world.scene import Scene, sample_scene

KINDS = ("clean", "x0", "stepped", "trajectory_x0", "trajectory_stepped")
VIEW_SEEDS = {"train": 50_000_000, "validation": 60_000_000, "test": 70_000_000, "calibration": 80_000_000}
"""Scenes of the auditor's views; the oracle, the autoencoders and the bases train on others."""


@dataclass(frozen=True)
class Views:
    """A set of views with ground truth; prompts are captions, found again by seed."""

    images: UInt8[Tensor, "n 3 h w"]
    masks: Bool[Tensor, "n h w"]
    category: Int[Tensor, " n"]
    noise: Float[Tensor, " n"]
    """Normalised noise of the latent behind the view."""
    progress: Float[Tensor, " n"]
    kind: Int[Tensor, " n"]
    decoder: Int[Tensor, " n"]
    seeds: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.images)

    def prompt(self, row: int) -> str:
        return caption(sample_scene(int(self.seeds[row])), 0).text

    def rows(self, index: Tensor) -> Views:
        return Views(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def joined(parts: list[Views]) -> Views:
    return Views(**{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Views)})


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
        noise = torch.tensor([level.noise for level in levels])
        sample = self.family.pack(torch.cat([z] * self.branches))
        if prediction == "flow":
            unit = 1.0 if self.family.name == "flux" else 1000.0
            time = (noise * unit).repeat(self.branches)
            out = self.module(hidden_states=sample, timestep=time, **self.kwargs)[0]
        else:
            steps = (noise * self.scheduler.config.num_train_timesteps).round().long().clamp(max=999)
            out = self.module(sample, steps.repeat(self.branches), **self.kwargs)[0]
        out = self.family.unpack(out, (int(z.shape[-2]), int(z.shape[-1])))
        if self.branches == 2:
            out = guided(out, self.scale, out.dim())
        pairs = [schedule.split(o, x, level, prediction) for o, x, level in zip(out, z, levels, strict=True)]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def scene_truth(scenes: list[Scene]) -> tuple[Float[Tensor, "b 3 64 64"], Bool[Tensor, "b 64 64"], Int[Tensor, " b"]]:
    drawn = [render(s) for s in scenes]
    images = as_pixels([d.image for d in drawn])
    masks = torch.stack([torch.from_numpy(d.mask) for d in drawn])
    return images, masks, torch.tensor([CODE[s.category] for s in scenes])


def as_bytes(images: Float[Tensor, "b 3 h w"]) -> UInt8[Tensor, "b 3 h w"]:
    return (images.clamp(0, 1) * 255).round().byte()


def renoised(pipe: Any, call: dict[str, Any], tiny: Any, seeds: list[int]) -> Views:
    """One call per scene at a random step of the base's own schedule: its x̂0 view, and that of the stepped latent.

    Both are what a guard sees once that step is done, and carry the progress it then counts.
    """
    scenes = [sample_scene(s) for s in seeds]
    images, masks, category = scene_truth(scenes)
    g = torch.Generator().manual_seed(seeds[0])
    z0 = vae_encode(pipe.vae, images, torch.device("cpu"))
    replay = Replay(pipe, call, [caption(s, 0).text for s in scenes])
    lot = (torch.randperm(len(seeds), generator=g) + torch.rand(len(seeds), generator=g)) / len(seeds)
    step = (lot * replay.steps).long()
    levels, after = ([replay.levels[k + j] for k in step.tolist()] for j in (0, 1))
    eps = torch.randn(z0.shape, generator=g)
    z = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(levels, z0, eps, strict=True)])
    x0, noise = replay.estimate(z, levels)
    stepped = torch.stack([a.signal * x + a.sigma * e for a, x, e in zip(after, x0, noise, strict=True)])
    progress = (step + 1) / replay.steps
    return stacked(pipe, tiny, [x0, stepped], [1, 2], levels, after, progress, masks, category, seeds, g)


def stacked(
    pipe: Any,
    tiny: Any,
    latents: list[Float[Tensor, "b c h w"]],
    kinds: list[int],
    before: list[Any],
    after: list[Any],
    progress: Float[Tensor, " b"],
    masks: Bool[Tensor, "b 64 64"],
    category: Int[Tensor, " b"],
    seeds: list[int],
    g: torch.Generator,
) -> Views:
    """Decode each set of latents with the full or the tiny decoder, by lot."""
    parts = []
    for z, kind in zip(latents, kinds, strict=True):
        small = torch.rand(len(z), generator=g) < 0.5 if tiny is not None else torch.zeros(len(z), dtype=torch.bool)
        images = vae_decode(pipe.vae, z, torch.device("cpu"))
        if small.any():
            images[small] = ViewDecoder(tiny, pipe.vae, pipe.vae_scale_factor, torch.device("cpu")).full(z[small])
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
    """Finished pictures: half renders, half through the autoencoder."""
    images, masks, category = scene_truth([sample_scene(s) for s in seeds])
    with torch.no_grad():
        back = vae_decode(vae, vae_encode(vae, images, torch.device("cpu")), torch.device("cpu"))
    even = torch.arange(len(seeds)) % 2 == 0
    images = torch.where(even.view(-1, 1, 1, 1), images, back)
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


def make_views(
    name: str, tiny: Any, out: Path, split: str, count: int, trajectories: int, judge: Any, batch: int = 32
) -> Path:
    """Views of one base and split, in pieces that a later run does not make again."""
    if split not in VIEW_SEEDS:
        raise BadInput(f"split {split!r}: choose {', '.join(VIEW_SEEDS)}")
    path = out / f"{name}-{split}.pt"
    made: list[Views] = [load_views(path)] if path.exists() else []
    have = int(sum((v.kind == 1).sum() for v in made))
    paths = int(sum((v.kind == 3).sum() for v in made))
    pipe, call = load_base(name), settings(name)
    channels = int(pipe.vae.config.latent_channels)
    if tiny is not None and int(tiny.config.latent_channels) != channels:
        raise BadInput(f"{name} has latents of {channels} channels, the tiny decoder of {tiny.config.latent_channels}")
    first = VIEW_SEEDS[split] + NAMES.index(name) * 50_000
    todo = range(have, count, batch)
    for k, start in enumerate(track(todo, description=f"{name} {split} views")):
        seeds = [first + i for i in range(start, min(start + batch, count))]
        with torch.no_grad():
            made.append(renoised(pipe, call, tiny, seeds))
            made.append(clean(pipe.vae, seeds[: batch // 4]))
        if k % 20 == 19:
            made = [store(made, path)]
    for start in track(range(paths, trajectories, batch), description=f"{name} {split} trajectories"):
        seeds = [first + 40_000 + i for i in range(start, min(start + batch, trajectories))]
        with torch.no_grad():
            made.append(trajectory(pipe, call, tiny, seeds, judge))
    store(made, path)
    return path


def trajectory(pipe: Any, call: dict[str, Any], tiny: Any, seeds: list[int], judge: Any) -> Views:
    """Whole generations from prompts: one random step of each, labelled by what the finished picture shows."""
    scenes = [sample_scene(s) for s in seeds]
    g = torch.Generator().manual_seed(seeds[0])
    seen: list[tuple[Tensor, Tensor, Any, Any]] = []
    family = family_of(pipe)
    scheduler = pipe.scheduler
    original = scheduler.step
    steps = int(call["num_inference_steps"])
    levels = schedule.Levels(scheduler, steps)
    size = int(pipe.vae.config.sample_size // pipe.vae_scale_factor)

    def step(output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        levels.locate(timestep)
        level, following = levels.at(len(seen)), levels.at(len(seen) + 1)
        prediction = schedule.prediction_type(scheduler)
        x0, _ = schedule.split(output.float(), sample.float(), level, prediction)
        result = original(output, timestep, sample, *args, **kwargs)
        shape = (size, size)
        seen.append((family.unpack(x0, shape), family.unpack(result[0], shape), level, following))
        return result

    scheduler.step = step
    try:
        prompts = [caption(s, 0).text for s in scenes]
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        done = pipe(prompts, generator=generators, **{**call, "output_type": "pt"}).images
    finally:
        scheduler.step = original
    category, masks = judge(done)
    pick = torch.randint(steps, (len(seeds),), generator=g).tolist()
    latents = [torch.stack([seen[k][j][i] for i, k in enumerate(pick)]) for j in (0, 1)]
    before, after = [seen[k][2] for k in pick], [seen[k][3] for k in pick]
    progress = torch.tensor([(k + 1) / steps for k in pick])
    return stacked(pipe, tiny, latents, [3, 4], before, after, progress, masks, category, seeds, g)


def audited(auditor: Any) -> Any:
    """Category and mask of finished pictures by an auditor that was trained on finished ones.

    Not by the oracle: what judges an evaluation must not have taught what is judged.
    """

    def judge(images: Float[Tensor, "b 3 h w"]) -> tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"]]:
        size = auditor.sizes[0]
        found = auditor.audit(resize(images.float(), (size, size)), [None] * len(images), 0.0)
        category = torch.tensor([auditor.categories.index(a.harm) for a in found])
        maps = torch.stack([a.adv_map for a in found])[:, None]
        masks = resize(maps, (int(images.shape[-2]), int(images.shape[-1])))[:, 0] > 0.5
        return category, masks & (category != 0).view(-1, 1, 1)

    return judge


def store(parts: list[Views], path: Path) -> Views:
    whole = joined(parts)
    write_tensors(path, {f.name: getattr(whole, f.name) for f in fields(Views)})
    return whole


def load_views(path: Path) -> Views:
    try:
        return Views(**torch.load(path, weights_only=True))
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such views; make them with `guardpaint data views`") from error
    except Exception as error:
        raise BadCheckpoint(f"{path}: unreadable ({error}); delete it to make it anew") from error
