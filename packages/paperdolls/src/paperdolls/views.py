"""Views of scenes for the auditor: re-noised renders, renders that a base redraws from half noise, whole generations.

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

from guardpaint.bases import BaseOptions, load_base
from guardpaint.data.views import (
    KINDS,
    Labelled,
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
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.families import family_of
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.store.images import as_pixels
from guardpaint.store.progress import track
from guardpaint.types import SAFE, Level
from paperdolls.bases import NAMES
from paperdolls.captions import caption
from paperdolls.render import CODE, SIZE, render
from paperdolls.scene import Scene, safe_version, sample_scene

WORLD = "paperdolls"
"""Name of the testbed whose scenes these views show; it is stored with the seeds."""
Labels = tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Float[Tensor, " b"]]
PictureLabeler = Callable[[Float[Tensor, "b 3 h w"]], Labels]
"""Returns the category and the unsafe pixels of each picture, and the probability that it is unsafe."""

VIEW_SEEDS = {
    "train": 50_000_000,
    "validation": 60_000_000,
    "test": 70_000_000,
    "calibration": 80_000_000,
    "oracle": 44_000_000,
}
"""First scene of each split of views: `oracle` for the oracle, the others for the auditor. No other model uses them."""
PER_BASE, REDRAWN_FROM, TRAJECTORIES_FROM = 50_000, 30_000, 40_000
"""How many seeds each base has, and the offsets at which those of redrawn and of generated pictures begin."""
HALF_NOISE = (0.30, 0.55)
"""Share of noise from which a render is redrawn: it keeps the scene's content and takes on the base's style."""
SURE = 0.95
"""The picture of a harmless prompt counts as harmless below this unsafe probability of the judge."""


def scene_truth(
    scenes: list[Scene], size: int = SIZE
) -> tuple[Float[Tensor, "b 3 s s"], Bool[Tensor, "b s s"], Int[Tensor, " b"]]:
    """Renders, unsafe pixels and categories of scenes."""
    drawn = [render(s, size) for s in scenes]
    images = as_pixels([d.image for d in drawn])
    masks = torch.stack([torch.from_numpy(d.mask) for d in drawn])
    return images, masks, torch.tensor([CODE[s.category] for s in scenes])


def labelled(seeds: list[int], size: int = SIZE) -> Labelled:
    """The renders of scenes as a labelled batch, each with its first caption as the prompt."""
    scenes = [sample_scene(s) for s in seeds]
    images, masks, category = scene_truth(scenes, size)
    return Labelled(images, masks, category, seeds, [caption(s, 0).text for s in scenes], tuple(CODE), WORLD)


def side(vae: Any) -> int:
    """Side in pixels of the pictures that an autoencoder was trained on."""
    return int(vae.config.sample_size)


def renoised(base: ViewedBase, seeds: list[int]) -> Views:
    """Views of re-noised renders."""
    return renoised_pictures(base, labelled(seeds, side(base.pipe.vae)))


def clean(vae: Any, seeds: list[int]) -> Views:
    """Views of finished renders; every second one has passed through the autoencoder."""
    even = torch.arange(len(seeds)) % 2 == 0
    return clean_pictures(vae, labelled(seeds, side(vae)), even, torch.device("cpu"))


def noise_share(level: Level) -> float:
    """σ / (σ + signal): the share of noise in a latent at this level."""
    return float(level.sigma / (level.sigma + level.signal))


@torch.no_grad()
def redrawn(base: ViewedBase, seeds: list[int]) -> Views:
    """Renders, half noised and then finished by the base's last steps; and views from the step before the last.

    Pictures that no longer show what makes their scene unsafe are dropped.
    """
    scenes, batch = [sample_scene(s) for s in seeds], labelled(seeds, side(base.pipe.vae))
    vae, cpu = base.pipe.vae, torch.device("cpu")
    g = torch.Generator().manual_seed(seeds[0])
    z = vae_encode(vae, batch.images, cpu)
    denoiser = Denoiser.from_prompts(base.pipe, batch.prompts, base.call)
    levels, count = denoiser.levels, len(denoiser.levels) - 1
    low, high = HALF_NOISE
    middle = (low + high) / 2
    able = [k for k in range(count) if low <= noise_share(levels[k]) <= high]
    able = able or [min(range(count), key=lambda k: abs(noise_share(levels[k]) - middle))]
    first = able[int(torch.randint(len(able), (), generator=g))]
    start = levels[first]
    z = start.signal * z + start.sigma * torch.randn(z.shape, generator=g)
    late: list[Views] = []
    for k in range(first, count):
        before, after = levels[k], levels[k + 1]
        x0, noise = denoiser.estimate(z, [before] * len(z))
        z = after.signal * x0 + after.sigma * noise
        if k == count - 2:
            progress = torch.full((len(z),), (k + 1) / count)
            steps = Steps([before] * len(z), [after] * len(z), progress)
            late.append(stacked(base, batch, {"redrawn_x0": x0}, steps, g))
    finished = batch.views(vae_decode(vae, z, cpu), "redrawn")
    whole = joined([*late, finished])
    kept = still_there(finished.images.float() / 255, scenes)
    return whole.rows(torch.nonzero(kept.repeat(len(whole) // len(kept)))[:, 0])


def still_there(images: Float[Tensor, "b 3 h w"], scenes: list[Scene]) -> Bool[Tensor, " b"]:
    """Whether each redrawn picture still shows what makes its scene unsafe; true for safe scenes.

    It does if, in the unsafe area, it is closer to the scene's render than to the render of its safe version.
    """
    kept = []
    for image, scene in zip(images, scenes, strict=True):
        if scene.category == SAFE:
            kept.append(True)
            continue
        both, masks, _ = scene_truth([scene, safe_version(scene)], image.shape[-1])
        unsafe, safe = ((image - other).square().mean(0)[masks[0]].mean() for other in both)
        kept.append(bool(unsafe < safe))
    return torch.tensor(kept)


@dataclass
class Trajectory:
    """Listens to the tap and records the clean estimate, the stepped latent and both noise levels of every step."""

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
        """Nothing to record: the pipeline returns the finished picture."""

    def at(self, rows: list[int]) -> tuple[dict[str, Tensor], Steps]:
        """The latents of picture i at step rows[i], by kind of view, and those steps."""
        x0 = torch.stack([self.seen[k][0][i] for i, k in enumerate(rows)])
        stepped = torch.stack([self.seen[k][1][i] for i, k in enumerate(rows)])
        progress = torch.tensor([(k + 1) / self.steps for k in rows])
        steps = Steps([self.seen[k][2] for k in rows], [self.seen[k][3] for k in rows], progress)
        return {"trajectory_x0": x0, "trajectory_stepped": stepped}, steps


def trajectory(base: ViewedBase, seeds: list[int], judge: PictureLabeler) -> Views:
    """Views of whole generations: one random step of each and the finished picture. Uncertain labels are dropped."""
    scenes, batch = [sample_scene(s) for s in seeds], labelled(seeds, side(base.pipe.vae))
    g = torch.Generator().manual_seed(seeds[0])
    followed = Trajectory(base.pipe, base.steps)
    with tapped(base.pipe, followed.family, followed):
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        images = base.pipe(batch.prompts, generator=generators, **{**base.call, "output_type": "pt"}).images
    category, masks, sure = labels(batch.category, *judge(images))
    sure = sure & torch.tensor(
        [s.kind != "blade" for s in scenes]
    )  # bases often lose the blade, and auditors report it anyway
    batch = replace(batch, category=category, masks=masks)
    latents, steps = followed.at(torch.randint(base.steps, (len(seeds),), generator=g).tolist())
    both = joined([stacked(base, batch, latents, steps, g), batch.views(images.float(), "generated")])
    return both.rows(torch.nonzero(sure.repeat(3))[:, 0])


def labels(
    requested: Int[Tensor, " b"], judged: Int[Tensor, " b"], where: Bool[Tensor, "b h w"], harm: Float[Tensor, " b"]
) -> tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Bool[Tensor, " b"]]:
    """The category and the unsafe pixels of generated pictures, and whether this label is certain.

    A base rarely draws harm that the prompt does not request; an auditor more often mistakes something harmless for
    harm. So a picture of a harmless prompt counts as harmless unless the judge is sure of the contrary.
    """
    known = torch.where(requested == 0, harm < SURE, (judged == requested) & where.flatten(1).any(1))
    return requested, where & (requested != 0).view(-1, 1, 1), known


def audited(auditor: Any) -> PictureLabeler:
    """A judge from an auditor that was trained on finished pictures.

    The oracle is not used here: it judges evaluations, so it must not label the training data of what it judges.
    """

    def judge(
        images: Float[Tensor, "b 3 h w"],
    ) -> tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Float[Tensor, " b"]]:
        size = auditor.sizes[0]
        audits = auditor.audit(resize(images.float(), (size, size)), [None] * len(images), 0.0)
        category = torch.tensor([auditor.categories.index(a.harm) for a in audits])
        maps = torch.stack([a.adv_map for a in audits])[:, None]
        masks = resize(maps, (int(images.shape[-2]), int(images.shape[-1])))[:, 0] > 0.5
        return category, masks & (category != 0).view(-1, 1, 1), torch.tensor([a.adv_prob for a in audits])

    return judge


def make_views(
    name: str,
    out: Path,
    split: str,
    counts: Mapping[str, int],
    tiny: Any = None,
    judge: PictureLabeler | None = None,
    batch: int = 32,
    options: BaseOptions | None = None,
) -> Path:
    """Write the views of one base and split, and return their file. Batches that it already has are not made again.

    `counts` has the number of scenes to re-noise (`renoised`), to redraw (`redrawn`) and to generate (`trajectories`);
    each is rounded up to whole batches.
    """
    if split not in VIEW_SEEDS:
        raise BadInput(f"split {split!r}: choose {', '.join(VIEW_SEEDS)}")
    if name not in NAMES:
        raise BadInput(f"base {name!r}: choose one of {', '.join(NAMES)}")
    path = out / f"{name}-{split}.pt"
    parts: list[Views] = [load_views(path)] if path.exists() else []
    loaded = load_base(name, options)
    base = ViewedBase(loaded.pipe, dict(loaded.call), tiny)
    channels = int(base.pipe.vae.config.latent_channels)
    if tiny is not None and int(tiny.config.latent_channels) != channels:
        theirs = tiny.config.latent_channels
        raise BadInput(f"--tiny decodes latents of {theirs} channels, {name} has {channels}: use tiny{channels}")
    if not parts and not any(counts.values()):
        raise BadInput(f"no views of {name} requested: give --count, --redrawn or --trajectories")
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
    """How many whole batches of seeds earlier runs have used, dropped pictures included."""
    used = [int(v.seeds[v.kind == kind].max()) - first + 1 for v in parts if bool((v.kind == kind).any())]
    return -(-max(used, default=0) // batch)
