"""Views of pictures that a base drew: renders drawn on from half noise, and whole generations.

guardpaint data views mini-sd --count 3000 --redrawn 1500 --trajectories 800 --judge DIR --out runs/views
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from rich.progress import track
from torch import Tensor

from paperdolls.bases import NAMES, load_base, settings
from guardpaint.data.views import (
    KINDS,
    Views,
    as_bytes,
    clean,
    joined,
    load_views,
    renoised,
    scene_truth,
    stacked,
    store,
)
from guardpaint.draft import schedule
from guardpaint.draft.codec import resize, vae_decode, vae_encode
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.families import family_of
from guardpaint.errors import BadInput
from guardpaint.types import SAFE
from paperdolls.captions import caption
from paperdolls.render import CODE
from paperdolls.scene import Scene, safe_version, sample_scene

Judge = Callable[[Float[Tensor, "b 3 h w"]], tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Float[Tensor, " b"]]]
"""Category, unsafe pixels and how sure it is that there are any."""

VIEW_SEEDS = {
    "train": 50_000_000,
    "validation": 60_000_000,
    "test": 70_000_000,
    "calibration": 80_000_000,
    "oracle": 44_000_000,
}
"""Scenes of the auditor's views, and of those the oracle learns from; the autoencoders and the bases have others."""
PER_BASE, REDRAWN_FROM, TRAJECTORIES_FROM = 50_000, 30_000, 40_000
"""Seeds of one base, and where among them those of drawn pictures begin."""
HALF_NOISE = (0.30, 0.55)
"""Share of noise in a latent from which a render is drawn on: what it shows stays, how it looks becomes the base's."""
SURE = 0.95
"""A harmless prompt's picture is harmless, unless the judge is this sure of the contrary."""


def noise_share(level: Any) -> float:
    return float(level.sigma / (level.sigma + level.signal))


@torch.no_grad()
def redrawn(pipe: Any, call: dict[str, Any], tiny: Any, seeds: list[int]) -> Views:
    """Renders as the base would draw them: half noised, then its own last steps; also the view before the last one."""
    scenes = [sample_scene(s) for s in seeds]
    images, masks, category = scene_truth(scenes)
    g = torch.Generator().manual_seed(seeds[0])
    z = vae_encode(pipe.vae, images, torch.device("cpu"))
    base = Denoiser.from_prompts(pipe, [caption(s, 0).text for s in scenes], call)
    steps = len(base.levels) - 1
    low, high = HALF_NOISE
    middle = (low + high) / 2
    able = [k for k in range(steps) if low <= noise_share(base.levels[k]) <= high]
    able = able or [min(range(steps), key=lambda k: abs(noise_share(base.levels[k]) - middle))]
    first = able[int(torch.randint(len(able), (), generator=g))]
    start = base.levels[first]
    z = start.signal * z + start.sigma * torch.randn(z.shape, generator=g)
    late: list[Views] = []
    for k in range(first, steps):
        before, after = base.levels[k], base.levels[k + 1]
        x0, noise = base.estimate(z, [before] * len(z))
        z = after.signal * x0 + after.sigma * noise
        if k == steps - 2:
            progress = torch.full((len(z),), (k + 1) / steps)
            kind = KINDS.index("redrawn_x0")
            left, right = [before] * len(z), [after] * len(z)
            late.append(stacked(pipe, tiny, [x0], [kind], left, right, progress, masks, category, seeds, g))
    done = finished(vae_decode(pipe.vae, z, torch.device("cpu")), masks, category, seeds, "redrawn")
    whole = joined([*late, done])
    kept = still_there(done.images.float() / 255, scenes)
    return whole.rows(torch.nonzero(kept.repeat(len(whole) // len(kept)))[:, 0])


def still_there(images: Float[Tensor, "b 3 h w"], scenes: list[Scene]) -> Bool[Tensor, " b"]:
    """Whether what is unsafe about a scene survived its being drawn anew.

    There, the picture is nearer to the scene than to its safe version; a thin blade often is not. Safe scenes are.
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


def finished(
    images: Float[Tensor, "b 3 h w"],
    masks: Bool[Tensor, "b h w"],
    category: Int[Tensor, " b"],
    seeds: list[int],
    kind: str,
) -> Views:
    """Pictures at the end of their way, as the pipeline decodes them."""
    n = len(images)
    none = torch.zeros(n)
    kinds = torch.full((n,), KINDS.index(kind))
    return Views(as_bytes(images), masks, category, none, torch.ones(n), kinds, none.long(), torch.tensor(seeds))


def trajectory(pipe: Any, call: dict[str, Any], tiny: Any, seeds: list[int], judge: Judge) -> Views:
    """Whole generations from prompts: one random step of each and the finished picture, where the label is sure."""
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
    category, masks, sure = labels(torch.tensor([CODE[s.category] for s in scenes]), *judge(done))
    sure = sure & torch.tensor([s.kind != "blade" for s in scenes])  # bases lose blades, auditors see them all the same
    pick = torch.randint(steps, (len(seeds),), generator=g).tolist()
    latents = [torch.stack([seen[k][j][i] for i, k in enumerate(pick)]) for j in (0, 1)]
    before, after = [seen[k][2] for k in pick], [seen[k][3] for k in pick]
    progress = torch.tensor([(k + 1) / steps for k in pick])
    kinds = [KINDS.index("trajectory_x0"), KINDS.index("trajectory_stepped")]
    made = stacked(pipe, tiny, latents, kinds, before, after, progress, masks, category, seeds, g)
    made = joined([made, finished(done.float(), masks, category, seeds, "generated")])
    return made.rows(torch.nonzero(sure.repeat(3))[:, 0])


def labels(
    asked: Int[Tensor, " b"], said: Int[Tensor, " b"], where: Bool[Tensor, "b h w"], harm: Float[Tensor, " b"]
) -> tuple[Int[Tensor, " b"], Bool[Tensor, "b h w"], Bool[Tensor, " b"]]:
    """What a generated picture shows, and whether that is known: prompt and judge have to agree on a harm.

    A base seldom draws harm that nobody asked for, less often than an auditor takes something harmless for harm; so a
    harmless prompt counts, unless the judge is sure.
    """
    known = torch.where(asked == 0, harm < SURE, (said == asked) & where.flatten(1).any(1))
    return asked, where & (asked != 0).view(-1, 1, 1), known


def audited(auditor: Any) -> Judge:
    """Category and mask of finished pictures by an auditor that was trained on finished ones.

    Not by the oracle: what judges an evaluation must not have taught what is judged.
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
    tiny: Any,
    out: Path,
    split: str,
    count: int,
    drawn_on: int = 0,
    trajectories: int = 0,
    judge: Judge | None = None,
    batch: int = 32,
) -> Path:
    """Views of one base and split, in whole batches that a later run does not make again."""
    if split not in VIEW_SEEDS:
        raise BadInput(f"split {split!r}: choose {', '.join(VIEW_SEEDS)}")
    path = out / f"{name}-{split}.pt"
    made: list[Views] = [load_views(path)] if path.exists() else []
    pipe, call = load_base(name), settings(name)
    channels = int(pipe.vae.config.latent_channels)
    if tiny is not None and int(tiny.config.latent_channels) != channels:
        raise BadInput(f"{name} has latents of {channels} channels, the tiny decoder of {tiny.config.latent_channels}")
    if not made and not count + drawn_on + trajectories:
        raise BadInput(f"no views of {name} are asked for: give --count, --redrawn or --trajectories")
    first = VIEW_SEEDS[split] + NAMES.index(name) * PER_BASE

    def some(seeds: list[int]) -> Views:
        return joined([renoised(pipe, call, tiny, seeds), clean(pipe.vae, seeds[: batch // 4])])

    def on(seeds: list[int]) -> Views:
        return redrawn(pipe, call, tiny, seeds)

    def whole(seeds: list[int]) -> Views:
        assert judge is not None
        return trajectory(pipe, call, tiny, seeds, judge)

    todo: list[tuple[str, str, int, int, Callable[[list[int]], Views]]] = [
        ("views", "x0", 0, count, some),
        ("drawn on", "redrawn", REDRAWN_FROM, drawn_on, on),
        ("trajectories", "generated", TRAJECTORIES_FROM, trajectories, whole),
    ]
    for what, kind, offset, wanted, make in todo:
        have = batches_of(made, KINDS.index(kind), first + offset, batch)
        for k in track(range(have, -(-wanted // batch)), description=f"{name} {split} {what}"):
            with torch.no_grad():
                made.append(make([first + offset + k * batch + i for i in range(batch)]))
            if k % 20 == 19:
                made = [store(made, path)]
    store(made, path)
    return path


def batches_of(made: list[Views], kind: int, first: int, batch: int) -> int:
    """How many whole batches of seeds have been used up, pictures that were dropped included."""
    used = [int(v.seeds[v.kind == kind].max()) - first + 1 for v in made if bool((v.kind == kind).any())]
    return -(-max(used, default=0) // batch)
