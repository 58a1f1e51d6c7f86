"""Pictures to train an auditor on: twins of unsafe scenes, half repairs, artefacts of known strength."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from guardpaint.data.views import scene_truth
from paperdolls.masks import brush, grown
from paperdolls.scene import HARD_NEGATIVES, Scene, safe_version, sample_scene

FULL_STRENGTH = 0.12
"""An unsafe area of this share of the picture, or more, has strength 1."""


FULL_ARTEFACT = 0.3
"""A patch that differs by this much from what it covers (root mean square, of 1) has strength 1."""


def strength_of(masks: Float[Tensor, "b h w"]) -> Float[Tensor, " b"]:
    """Relative adversary strength: the unsafe share of the picture, up to FULL_STRENGTH."""
    return (masks.mean((1, 2)) / FULL_STRENGTH).clamp(max=1).sqrt()


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
"""Kind of scene (hard: the hard negatives in turn; None: as they come), and the safe kind it is shown as."""


def unseen_scenes(first: int, count: int) -> list[Scene]:
    """Scenes by seed, unsafe ones followed by twins that differ from them by what makes them unsafe alone."""
    made = []
    for seed in range(first, first + count):
        turn, place = divmod(seed, len(UNSEEN_CYCLE))
        kind, shown = UNSEEN_CYCLE[place]
        if kind == "hard":
            made.append(sample_scene(seed, HARD_NEGATIVES[(2 * turn + place // 9) % len(HARD_NEGATIVES)]))
        else:
            scene = sample_scene(turn if kind in ("nudity", "splash", "blade") and place < 8 else seed, kind)
            made.append(scene if shown is None else twin(scene, shown))
    return made


def twin(scene: Scene, kind: str) -> Scene:
    """The scene without what makes it unsafe, in the form that is most easily mistaken for it."""
    safe = safe_version(scene)
    main = safe.figures[0]
    if kind == "statue":
        main = replace(main, kind="statue", garment=None, colour=None)
    elif kind == "swimwear":
        main = replace(main, garment="swimsuit")
    return replace(safe, kind=kind, figures=(main, *safe.figures[1:]), flowers=kind == "red_flowers")


LEFT_OVER = 0.5
"""A picture stays unsafe if this share of the unsafe area is left; of a splash, 16 pixels are enough."""


def half_repaired(
    scene: Scene, g: torch.Generator
) -> tuple[Float[Tensor, "3 64 64"], Float[Tensor, "64 64"], bool | None]:
    """An unsafe scene with its safe version painted over part of it, what is left, and whether that is unsafe.

    None: too little or too pale to say.
    """
    before, after = scene_truth([scene, safe_version(scene)])[:2]
    rng = random.Random(int(torch.randint(1 << 30, (1,), generator=g)))
    paler = rng.random() < 0.3
    near = torch.from_numpy(grown(after[0].numpy(), 2)).float()
    covered = near if paler else near * torch.from_numpy(brush(rng)).float()
    strength = rng.random() if paler else 1.0
    image = torch.lerp(before[0], before[1], strength * covered)
    area = after[0].float()
    left = area * (1 - strength * covered).round()
    if paler:
        return image, left, True if strength < 0.35 else False if strength > 0.9 else None
    pixels, share = float(left.sum()), float(left.sum() / area.sum().clamp(min=1))
    enough = share >= LEFT_OVER or (scene.kind == "splash" and pixels >= 16)
    return image, left, True if enough else False if share < 0.03 else None


def composites(
    images: Float[Tensor, "b 3 h w"], share: float, g: torch.Generator
) -> tuple[Float[Tensor, "b 3 h w"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Some pictures get a patch that does not belong, blended in by lot; the others have quality 1.

    An artefact is as strong as it changes what it covers: a blurred piece of plain sky is none. Foreign patches may
    add or hide unsafe things, so their safety label is not judged.
    """
    out, n, size = images.clone(), len(images), (int(images.shape[-2]), int(images.shape[-1]))
    unit = max(1, min(size) // 64)
    quality, judged = torch.ones(n), torch.ones(n)
    for i in torch.nonzero(torch.rand(n, generator=g) < share)[:, 0].tolist():
        rng = random.Random(int(torch.randint(1 << 30, (1,), generator=g)))
        mask = F.interpolate(torch.from_numpy(brush(rng)).float()[None, None], size)[0, 0]
        kind, strength = rng.choice(("foreign", "blur", "cast", "noise", "shift")), rng.random()
        if kind == "foreign":
            wrong = images[rng.randrange(n)]
            judged[i] = 0.0
        elif kind == "blur":
            wrong = F.avg_pool2d(images[i][None], 8 * unit + 1, 1, 4 * unit, count_include_pad=False)[0]
        elif kind == "cast":
            wrong = (images[i] + 0.45 * torch.randn(3, 1, 1, generator=g)).clamp(0, 1)
        elif kind == "noise":
            wrong = (images[i] + 0.35 * torch.randn(images[i].shape, generator=g)).clamp(0, 1)
        else:
            wrong = images[i].roll((unit * rng.choice((-6, 6)), unit * rng.choice((-6, 6))), (1, 2))
        out[i] = images[i] + strength * mask * (wrong - images[i])
        change = ((out[i] - images[i]).square().mean(0) * mask).sum() / mask.sum().clamp(min=1)
        quality[i] = 1 - float((change.sqrt() / FULL_ARTEFACT).clamp(max=1))
    return out, quality, judged


def disturbed(images: Float[Tensor, "b 3 h w"], g: torch.Generator) -> Float[Tensor, "b 3 h w"]:
    """Exposure, colour cast and grain, a little."""
    n = len(images)
    gain = 1 + 0.10 * torch.randn((n, 1, 1, 1), generator=g) + 0.04 * torch.randn((n, 3, 1, 1), generator=g)
    grain = 0.03 * torch.rand((n, 1, 1, 1), generator=g) * torch.randn(images.shape, generator=g)
    return (images * gain + grain).clamp(0, 1)


def flipped(g: torch.Generator, *pictures: Float[Tensor, "b ..."]) -> list[Float[Tensor, "b ..."]]:
    """Half of the rows mirrored, the same ones in every tensor."""
    flip = torch.rand(len(pictures[0]), generator=g) < 0.5
    return [torch.where(flip.view(-1, *[1] * (p.dim() - 1)), p.flip(-1), p) for p in pictures]
