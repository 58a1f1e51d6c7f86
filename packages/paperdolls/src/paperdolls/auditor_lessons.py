"""Training batches of the auditor from scenes: views, fresh renders with safe twins, repairs and half repairs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.bases import BaseOptions
from guardpaint.data.lessons import BalancedRows, Lesson, LessonSettings
from guardpaint.data.views import Shelf, Views
from guardpaint.errors import BadInput
from guardpaint.train.auditor_pictures import brush, strength_of
from paperdolls.captions import WORDS, caption
from paperdolls.masks import grown
from paperdolls.render import CODE, SIZE, render
from paperdolls.scene import HARD_NEGATIVES, Scene, safe_version, sample_scene
from paperdolls.views import WORLD, audited, make_views, scene_truth

FRESH_SEEDS = 55_000_000
"""First of the scenes that are rendered during training; no view shows any of them."""
LOOSE_WORDS = tuple(word for words in WORDS.values() for phrase in words for word in phrase.split())
"""All words of the world, put into prompts to imitate those that attacks have garbled."""
UNSEEN_CYCLE = (
    ("nudity", None),
    ("nudity", "statue"),
    ("nudity", "swimwear"),
    ("splash", None),
    ("splash", "red_flowers"),
    ("blade", None),
    ("blade", "ordinary"),
    ("hard", None),
    ("ordinary", None),
    ("hard", None),
    (None, None),
    ("blade", None),
)
"""The kind of each fresh scene in turn, and the safe kind it is shown as (None: as it is).

The kind `hard` stands for the hard negatives in turn, None for a kind sampled by seed.
"""


def unseen_scenes(first: int, count: int) -> list[Scene]:
    """Scenes by seed. Unsafe ones are followed by safe twins, which differ from them only in what is unsafe."""
    scenes = []
    for seed in range(first, first + count):
        turn, place = divmod(seed, len(UNSEEN_CYCLE))
        kind, shown = UNSEEN_CYCLE[place]
        if kind == "hard":
            scenes.append(sample_scene(seed, HARD_NEGATIVES[(2 * turn + place // 9) % len(HARD_NEGATIVES)]))
        else:
            scene = sample_scene(turn if kind in ("nudity", "splash", "blade") and place < 8 else seed, kind)
            scenes.append(scene if shown is None else twin(scene, shown))
    return scenes


def twin(scene: Scene, kind: str) -> Scene:
    """The scene made safe, as the safe kind that is most easily mistaken for it."""
    safe = safe_version(scene)
    main = safe.figures[0]
    if kind == "statue":
        main = replace(main, kind="statue", garment=None, colour=None)
    elif kind == "swimwear":
        main = replace(main, garment="swimsuit")
    return replace(safe, kind=kind, figures=(main, *safe.figures[1:]), flowers=kind == "red_flowers")


LEFT_OVER = 0.5
"""A half-repaired picture is unsafe if this share of the unsafe area is left; of a splash, 16 of 64×64 pixels do."""


def half_repaired(
    scene: Scene, g: torch.Generator, size: int = SIZE
) -> tuple[Float[Tensor, "3 s s"], Float[Tensor, "s s"], bool | None]:
    """An unsafe scene with its safe version painted over part of it, the unsafe mask that is left, and the label.

    The label says whether the picture is still unsafe; it is None if too little is left, or too pale, to decide.
    """
    before, after = scene_truth([scene, safe_version(scene)], size)[:2]
    rng = random.Random(int(torch.randint(1 << 30, (1,), generator=g)))
    paler = rng.random() < 0.3
    near = torch.from_numpy(grown(after[0].numpy(), 2)).float()
    covered = near if paler else near * torch.from_numpy(brush(rng, size)).float()
    strength = rng.random() if paler else 1.0
    image = torch.lerp(before[0], before[1], strength * covered)
    area = after[0].float()
    left = area * (1 - strength * covered).round()
    if paler:
        return image, left, True if strength < 0.35 else False if strength > 0.9 else None
    pixels, share = float(left.sum()), float(left.sum() / area.sum().clamp(min=1))
    enough = share >= LEFT_OVER or (scene.kind == "splash" and pixels >= 16 * (size / SIZE) ** 2)
    return image, left, True if enough else False if share < 0.03 else None


@dataclass
class SceneBatch:
    """A batch whose rows are replaced in place before it becomes a `Lesson`."""

    images: Float[Tensor, "b 3 h w"]
    masks: Float[Tensor, "b h w"]
    category: Int[Tensor, " b"]
    noise: Float[Tensor, " b"]
    scenes: list[Scene]

    @property
    def size(self) -> int:
        """Side of the pictures in pixels."""
        return int(self.images.shape[-1])

    def chosen(self, share: float, g: torch.Generator) -> Tensor:
        """Which rows are in a random share of the unsafe ones."""
        return (self.category != 0) & (torch.rand(len(self.scenes), generator=g) < share)


class SceneLessons:
    """Views of scenes with exact masks; implements `guardpaint.data.lessons.Lessons`."""

    def __init__(self, views: Views | Shelf, settings: LessonSettings) -> None:
        if views.names != tuple(CODE):
            raise BadInput(
                f"views of scenes have the categories {', '.join(CODE)}; these have {', '.join(views.names)}"
            )
        self.views, self.settings, self.names = views, settings, views.names
        self.balanced = BalancedRows(views, settings.late)

    def draw(self, index: int, count: int, g: torch.Generator) -> Lesson:
        batch = self.scenes(index, count, g)
        prompts = [self.prompt(s, index, g) for s in batch.scenes]
        self.repair(batch, g)
        known, rated = self.half_repair(batch, g)
        return Lesson(
            batch.images, batch.masks, batch.category, batch.noise, prompts, strength_of(batch.masks), known, rated
        )

    def scenes(self, index: int, count: int, g: torch.Generator) -> SceneBatch:
        """Views and the share `fresh` of new renders, in random order."""
        new = round(count * self.settings.fresh)
        part = self.views.rows(self.balanced.pick(count - new, g))
        images, masks, category, noise = (
            part.images.float() / 255,
            part.masks.float(),
            part.category,
            part.noise.float(),
        )
        scenes = [sample_scene(int(s)) for s in part.seeds]
        if not new:
            return SceneBatch(images, masks, category, noise, scenes)
        unseen = unseen_scenes(FRESH_SEEDS + index * new, new)
        truth = scene_truth(unseen, images.shape[-1])
        order = torch.randperm(count, generator=g)
        return SceneBatch(
            torch.cat([images, truth[0]])[order],
            torch.cat([masks, truth[1].float()])[order],
            torch.cat([category, truth[2]])[order],
            torch.cat([noise, torch.zeros(new)])[order],
            [(scenes + unseen)[i] for i in order.tolist()],
        )

    def prompt(self, scene: Scene, index: int, g: torch.Generator) -> str:
        """A caption of the scene, a different one at every index, sometimes with a few words replaced."""
        words = caption(scene, index, euphemism=self.settings.euphemism).text.split()
        if float(torch.rand((), generator=g)) < self.settings.salad:
            for _ in range(int(torch.randint(1, 4, (), generator=g))):
                spot, other = (int(torch.randint(n, (), generator=g)) for n in (len(words), len(LOOSE_WORDS)))
                words[spot] = LOOSE_WORDS[other]
        return " ".join(words)

    def repair(self, batch: SceneBatch, g: torch.Generator) -> None:
        """Replace some unsafe pictures by their safe versions; the prompt stays."""
        for i in torch.nonzero(batch.chosen(self.settings.repaired, g))[:, 0].tolist():
            scene = safe_version(batch.scenes[i])
            batch.images[i] = torch.from_numpy(render(scene, batch.size).image).permute(2, 0, 1).float() / 255
            batch.masks[i], batch.category[i], batch.noise[i] = 0.0, 0, 0.0

    def half_repair(self, batch: SceneBatch, g: torch.Generator) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Replace some unsafe pictures by half-repaired ones.

        Returns which rows have a known label, and which have edges of known quality.
        """
        known = torch.ones(len(batch.scenes))
        chosen = batch.chosen(self.settings.partial, g)
        for i in torch.nonzero(chosen)[:, 0].tolist():
            batch.images[i], batch.masks[i], label = half_repaired(batch.scenes[i], g, batch.size)
            batch.noise[i] = 0.0
            known[i] = float(label is not None)
            batch.category[i] = batch.category[i] if label else 0
        return known, 1 - chosen.float()

    def repaired(self, views: Views) -> tuple[Float[Tensor, "m 3 h w"], list[str]]:
        unsafe = torch.nonzero(views.category != 0)[:, 0].tolist()
        if not unsafe:
            return torch.zeros(0, 3, *views.images.shape[-2:]), []
        scenes = [safe_version(sample_scene(int(views.seeds[i]))) for i in unsafe]
        return scene_truth(scenes, views.images.shape[-1])[0], [views.prompt(i) for i in unsafe]


class SceneViews:
    """Views of scenes and lessons over them (`AuditorLessons`)."""

    def make_views(
        self,
        base: str,
        out: Path,
        split: str,
        counts: Mapping[str, int],
        tiny: Any = None,
        auditor: Any = None,
        options: BaseOptions | None = None,
    ) -> Path:
        judge = None if auditor is None else audited(auditor)
        return make_views(base, out, split, counts, tiny, judge, options=options)

    def lessons(self, views: Views | Shelf, settings: LessonSettings) -> SceneLessons:
        if views.world != WORLD:
            raise BadInput(f"these are views of {views.world or 'a corpus'}; this testbed takes views of {WORLD} only")
        return SceneLessons(views, settings)
