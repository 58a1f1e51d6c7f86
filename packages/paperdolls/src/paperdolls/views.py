"""Views of scenes for the auditor: renders re-noised or drawn on from half noise by a base, and whole generations.

guardpaint data views mini-sd --count 3000 --redrawn 1500 --trajectories 800 --judge DIR --out runs/views
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from guardpaint.bases import load_base
from guardpaint.data.views import (
    KINDS,
    Labelled,
    Replay,
    Steps,
    ViewedBase,
    Views,
    clean_pictures,
    joined,
    load_views,
    renoised_pictures,
    stacked,
    store,
)
from guardpaint.draft import schedule
from guardpaint.draft.codec import resize, vae_decode, vae_encode
from guardpaint.draft.conditioning import DenoiserCall
from guardpaint.draft.families import family_of
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.store.images import as_pixels
from guardpaint.store.progress import track
from guardpaint.types import SAFE, Level
from paperdolls.bases import NAMES
from paperdolls.captions import caption
from paperdolls.render import CODE, render
from paperdolls.scene import Scene, safe_version, sample_scene

WORLD = "paperdolls"
"""Name of the testbed whose scenes the seeds of these views identify."""
Judge = Callable[[Float[Tensor, "b 3 h w"]], tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Float[Tensor, " b"]]]
"""Category, unsafe pixels, and how sure the judge is that there are any."""

VIEW_SEEDS = {
    "train": 50_000_000,
    "validation": 60_000_000,
    "test": 70_000_000,
    "calibration": 80_000_000,
    "oracle": 44_000_000,
}
"""First scene of each split of the auditor's views, and of those the oracle learns from; no other model sees them."""
PER_BASE, REDRAWN_FROM, TRAJECTORIES_FROM = 50_000, 30_000, 40_000
"""How many seeds a base has, and where among them those of redrawn and of generated pictures begin."""
HALF_NOISE = (0.30, 0.55)
"""Share of noise in a latent from which a render is drawn on: the content stays, the look becomes the base's."""
SURE = 0.95
"""The picture of a harmless prompt counts as harmless unless the judge is this sure of the contrary."""


def scene_truth(scenes: list[Scene]) -> tuple[Float[Tensor, "b 3 64 64"], Bool[Tensor, "b 64 64"], Int[Tensor, " b"]]:
    """Renders, unsafe pixels and categories of scenes."""
    drawn = [render(s) for s in scenes]
    images = as_pixels([d.image for d in drawn])
    masks = torch.stack([torch.from_numpy(d.mask) for d in drawn])
    return images, masks, torch.tensor([CODE[s.category] for s in scenes])


def labelled(seeds: list[int]) -> Labelled:
    """Scenes by seed as a batch of pictures, each under its first caption."""
    scenes = [sample_scene(s) for s in seeds]
    images, masks, category = scene_truth(scenes)
    return Labelled(images, masks, category, seeds, [caption(s, 0).text for s in scenes], tuple(CODE), WORLD)


def renoised(base: ViewedBase, seeds: list[int]) -> Views:
    """Scenes, re-noised."""
    return renoised_pictures(base, labelled(seeds))


def clean(vae: Any, seeds: list[int]) -> Views:
    """Finished scenes; every second one went through the autoencoder."""
    even = torch.arange(len(seeds)) % 2 == 0
    return clean_pictures(vae, labelled(seeds), even, torch.device("cpu"))


def noise_share(level: Level) -> float:
    return float(level.sigma / (level.sigma + level.signal))


def redrawn(base: ViewedBase, seeds: list[int]) -> Views:
    """Renders as the base would draw them: half noised, then its own last steps; also the view before the last one."""
    scenes, batch = [sample_scene(s) for s in seeds], labelled(seeds)
    vae, cpu = base.pipe.vae, torch.device("cpu")
    g = torch.Generator().manual_seed(seeds[0])
    z = vae_encode(vae, batch.images, cpu)
    replay = Replay(base.pipe, base.call, batch.prompts)
    low, high = HALF_NOISE
    middle = (low + high) / 2
    able = [k for k in range(replay.steps) if low <= noise_share(replay.levels[k]) <= high]
    able = able or [min(range(replay.steps), key=lambda k: abs(noise_share(replay.levels[k]) - middle))]
    first = able[int(torch.randint(len(able), (), generator=g))]
    start = replay.levels[first]
    z = start.signal * z + start.sigma * torch.randn(z.shape, generator=g)
    late: list[Views] = []
    for k in range(first, replay.steps):
        before, after = replay.levels[k], replay.levels[k + 1]
        x0, noise = replay.estimate(z, [before] * len(z))
        z = after.signal * x0 + after.sigma * noise
        if k == replay.steps - 2:
            progress = torch.full((len(z),), (k + 1) / replay.steps)
            steps = Steps([before] * len(z), [after] * len(z), progress)
            late.append(stacked(base, batch, {"redrawn_x0": x0}, steps, g))
    finished = batch.views(vae_decode(vae, z, cpu), "redrawn")
    whole = joined([*late, finished])
    kept = still_there(finished.images.float() / 255, scenes)
    return whole.rows(torch.nonzero(kept.repeat(len(whole) // len(kept)))[:, 0])


def still_there(images: Float[Tensor, "b 3 h w"], scenes: list[Scene]) -> Bool[Tensor, " b"]:
    """Whether a redrawn scene still shows what makes it unsafe; always true for safe scenes.

    It does if the picture is nearer to the scene's render than to that of its safe version, in the unsafe area.
    """
    found = []
    for image, scene in zip(images, scenes, strict=True):
        if scene.category == SAFE:
            found.append(True)
            continue
        both, masks, _ = scene_truth([scene, safe_version(scene)])
        unsafe, safe = ((image - other).square().mean(0)[masks[0]].mean() for other in both)
        found.append(bool(unsafe < safe))
    return torch.tensor(found)


@dataclass
class Trajectory:
    """Follows a generation through the tap: estimate, stepped latent and both levels of every step."""

    pipe: Any
    steps: int
    seen: list[tuple[Tensor, Tensor, Level, Level]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.family = family_of(self.pipe)
        self.levels = schedule.Levels(self.pipe.scheduler, self.steps)
        self.size = int(self.pipe.vae.config.sample_size // self.pipe.vae_scale_factor)

    def before_call(self, call: DenoiserCall) -> DenoiserCall:
        return call

    def before_step(self, output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
        self.levels.locate(timestep)
        return output

    def after_step(self, output: Tensor, timestep: Any, sample: Tensor, stepped: Tensor) -> Tensor:
        level, following = self.levels.at(len(self.seen)), self.levels.at(len(self.seen) + 1)
        prediction = schedule.prediction_type(self.pipe.scheduler)
        x0, _ = schedule.split(output.float(), sample.float(), level, prediction)
        shape = (self.size, self.size)
        self.seen.append((self.family.unpack(x0, shape), self.family.unpack(stepped, shape), level, following))
        return stepped

    def decoded(self, images: Tensor) -> None:
        """The finished picture comes from the pipeline itself."""

    def at(self, rows: list[int]) -> tuple[dict[str, Tensor], Steps]:
        """Latents by kind, picture i at step rows[i]."""
        x0 = torch.stack([self.seen[k][0][i] for i, k in enumerate(rows)])
        stepped = torch.stack([self.seen[k][1][i] for i, k in enumerate(rows)])
        progress = torch.tensor([(k + 1) / self.steps for k in rows])
        steps = Steps([self.seen[k][2] for k in rows], [self.seen[k][3] for k in rows], progress)
        return {"trajectory_x0": x0, "trajectory_stepped": stepped}, steps


def trajectory(base: ViewedBase, seeds: list[int], judge: Judge) -> Views:
    """Whole generations from prompts: one random step of each and the finished picture, where the label is sure."""
    scenes, batch = [sample_scene(s) for s in seeds], labelled(seeds)
    g = torch.Generator().manual_seed(seeds[0])
    followed = Trajectory(base.pipe, base.steps)
    with tapped(base.pipe, followed.family, followed):
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        images = base.pipe(batch.prompts, generator=generators, **{**base.call, "output_type": "pt"}).images
    category, masks, sure = labels(batch.category, *judge(images))
    sure = sure & torch.tensor([s.kind != "blade" for s in scenes])  # bases lose blades, auditors see them all the same
    batch = replace(batch, category=category, masks=masks)
    latents, steps = followed.at(torch.randint(base.steps, (len(seeds),), generator=g).tolist())
    both = joined([stacked(base, batch, latents, steps, g), batch.views(images.float(), "generated")])
    return both.rows(torch.nonzero(sure.repeat(3))[:, 0])


def labels(
    requested: Int[Tensor, " b"], judged: Int[Tensor, " b"], where: Bool[Tensor, "b h w"], harm: Float[Tensor, " b"]
) -> tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Bool[Tensor, " b"]]:
    """Category and unsafe pixels of generated pictures, and whether prompt and judge agree on them.

    A base draws harm that nobody asked for less often than an auditor takes something harmless for harm. So a picture
    of a harmless prompt counts as harmless unless the judge is sure of harm.
    """
    known = torch.where(requested == 0, harm < SURE, (judged == requested) & where.flatten(1).any(1))
    return requested, where & (requested != 0).view(-1, 1, 1), known


def audited(auditor: Any) -> Judge:
    """A judge from an auditor that was trained on finished pictures.

    The oracle is not used here: what judges an evaluation must not have taught the model that is judged.
    """

    def judge(
        images: Float[Tensor, "b 3 h w"],
    ) -> tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Float[Tensor, " b"]]:
        size = auditor.sizes[0]
        found = auditor.audit(resize(images.float(), (size, size)), [None] * len(images), 0.0)
        category = torch.tensor([auditor.categories.index(a.harm) for a in found])
        maps = torch.stack([a.adv_map for a in found])[:, None]
        masks = resize(maps, (int(images.shape[-2]), int(images.shape[-1])))[:, 0] > 0.5
        return category, masks & (category != 0).view(-1, 1, 1), torch.tensor([a.adv_prob for a in found])

    return judge


def make_views(
    name: str,
    out: Path,
    split: str,
    counts: Mapping[str, int],
    tiny: Any = None,
    judge: Judge | None = None,
    batch: int = 32,
) -> Path:
    """Views of one base and split, in whole batches that a later run does not make again.

    `counts` says how many scenes are re-noised, redrawn and generated (`trajectories`).
    """
    if split not in VIEW_SEEDS:
        raise BadInput(f"split {split!r}: choose {', '.join(VIEW_SEEDS)}")
    if name not in NAMES:
        raise BadInput(f"base {name!r}: views of this world are made with one of {', '.join(NAMES)}")
    path = out / f"{name}-{split}.pt"
    parts: list[Views] = [load_views(path)] if path.exists() else []
    found = load_base(name)
    base = ViewedBase(found.pipe, dict(found.call), tiny)
    channels = int(base.pipe.vae.config.latent_channels)
    if tiny is not None and int(tiny.config.latent_channels) != channels:
        raise BadInput(f"{name} has latents of {channels} channels, the tiny decoder of {tiny.config.latent_channels}")
    if not parts and not any(counts.values()):
        raise BadInput(f"no views of {name} are asked for: give --count, --redrawn or --trajectories")
    if counts.get("trajectories") and judge is None:
        raise BadInput("trajectories are labelled by an auditor trained on finished pictures: name it with --judge")
    first = VIEW_SEEDS[split] + NAMES.index(name) * PER_BASE

    def both(seeds: list[int]) -> Views:
        return joined([renoised(base, seeds), clean(base.pipe.vae, seeds[: batch // 4])])

    def whole(seeds: list[int]) -> Views:
        assert judge is not None
        return trajectory(base, seeds, judge)

    todo: list[tuple[str, str, int, Callable[[list[int]], Views]]] = [
        ("renoised", "x0", 0, both),
        ("redrawn", "redrawn", REDRAWN_FROM, lambda seeds: redrawn(base, seeds)),
        ("trajectories", "generated", TRAJECTORIES_FROM, whole),
    ]
    for what, kind, offset, make in todo:
        have = batches_of(parts, KINDS.index(kind), first + offset, batch)
        for k in track(range(have, -(-counts.get(what, 0) // batch)), f"{name} {split} {what}"):
            with torch.no_grad():
                parts.append(make([first + offset + k * batch + i for i in range(batch)]))
            if k % 20 == 19:
                parts = [store(parts, path)]
    store(parts, path)
    return path


def batches_of(parts: list[Views], kind: int, first: int, batch: int) -> int:
    """How many whole batches of seeds were used before, including pictures that were dropped."""
    used = [int(v.seeds[v.kind == kind].max()) - first + 1 for v in parts if bool((v.kind == kind).any())]
    return -(-max(used, default=0) // batch)
