"""Train the evaluation oracle on renders of its own scenes, on their autoencoder round trips and on bases' versions.

guardpaint train oracle --set views=runs/views --out runs/oracle
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.data.views import KINDS, Views, joined, load_views
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadConfig, BadInput
from guardpaint.store.checkpoint import load_strict
from guardpaint.train.auditor_pictures import brush
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card
from guardpaint.train.latents import encoded, pixels_of, tokenise
from guardpaint.types import SAFE
from paperdolls.captions import caption
from paperdolls.masks import differs, grown, training_region
from paperdolls.models.vae import load_autoencoder
from paperdolls.oracle import CHOICES, PRESENT, Oracle, OracleConfig, OracleNet, Truth, truth
from paperdolls.render import SIZE, Rendered, render
from paperdolls.scene import PROPS, Scene, safe_version, sample_scene

ORACLE_SEEDS = 40_000_000
"""The oracle's own scenes: no other component trains on them."""
UNSEEN = 1_000_000
"""Later runs use other scenes: a warm-started one starts this many seeds later, one with soft pictures twice and one
with drawn pictures three times as many."""
HELD_OUT = 45_000_000
SMALL = {"prop": 3.0}
"""Loss weights of attributes that are easily overlooked; others have 1."""
ROUND_TRIPS = 0.5
"""Share of a batch that passes through an autoencoder first."""


WRONG_PLACE = 0.3
"""Share of the repairs that paint beside the harm and so leave the picture unsafe."""


@dataclass(frozen=True)
class Lesson:
    """The pictures of one step and their labels."""

    images: Float[Tensor, "b 3 s s"]
    want: Truth
    props: Float[Tensor, "b n u u"]
    """Where the main figure's prop is visible."""
    scenes: tuple[Scene, ...]
    props_known: Float[Tensor, " b"] | None = None
    """0 for pictures drawn by a base, which may have lost the prop, else 1; None if all are known."""


def losses(net: nn.Module, batch: Lesson) -> dict[str, Tensor]:
    """Cross-entropies of category, pixels, attributes and prop places, and the overlap (IoU) of the unsafe mask."""
    want = batch.want
    out = net(batch.images)
    f = nn.functional
    category = f.cross_entropy(out["category"], want.category)
    pixels = f.cross_entropy(out["pixels"], want.pixels)
    unsafe = 1 - out["pixels"].softmax(1)[:, 0]
    inside = (want.pixels > 0).float()
    both = (unsafe * inside).sum((1, 2)) + 1
    missed = (1 - both / (unsafe.sum((1, 2)) + inside.sum((1, 2)) - both + 2)).mean()
    choices = sum(f.cross_entropy(out[name], want.choices[name]) for name in CHOICES)
    known = torch.ones(len(batch.images)) if batch.props_known is None else batch.props_known
    present = sum(
        SMALL.get(name, 1.0) * presence(out[name], want.present[name], known if name == "prop" else None)
        for name in PRESENT
    )
    total = category + 2.0 * pixels + missed + 0.3 * choices + 2.0 * present
    if "prop_places" in out:
        each = f.binary_cross_entropy_with_logits(out["prop_places"], batch.props, reduction="none")
        each, there = each * known.view(-1, 1, 1, 1), batch.props * known.view(-1, 1, 1, 1)
        total = total + each.mean() + (each * there).sum() / there.sum().clamp(min=1)
    return {"loss": total, "category": category, "pixels": pixels, "dice": missed}


def presence(
    logits: Float[Tensor, "b n"], there: Float[Tensor, "b n"], known: Float[Tensor, " b"] | None
) -> Float[Tensor, ""]:
    """Cross-entropy of presence, over the rows in which it is known."""
    each = nn.functional.binary_cross_entropy_with_logits(logits, there, reduction="none").mean(1)
    return each.mean() if known is None else (known * each).sum() / known.sum().clamp(min=1)


def lesson_scenes(first: int, count: int) -> tuple[Scene, ...]:
    """Scenes by seed. Two of every eight are a scene with a blade in use and the same scene without it.

    Without these pairs the oracle would call any two figures that stand face to face violent.
    """
    scenes = []
    for seed in range(first, first + count):
        scene = sample_scene(seed - seed % 8, "blade") if seed % 8 < 2 else sample_scene(seed)
        scenes.append(safe_version(scene) if seed % 8 == 1 else scene)
    return tuple(scenes)


@dataclass(frozen=True)
class OracleRecipe(OracleConfig):
    """The shape of an oracle and what its lessons are made of."""

    repaired: float = 0.0
    """Share of unsafe pictures that are shown repaired: painted over with the safe version's pixels, or half so."""

    @property
    def shape(self) -> OracleConfig:
        return OracleConfig(self.channels, self.spots, self.size, self.fold)


PLAIN = OracleRecipe()
"""Pictures of 64 pixels, none of them repaired."""


def prop_places(scene: Scene, image: np.ndarray, fold: int = 2) -> Float[Tensor, "n u u"]:
    """Cells of `fold` by `fold` pixels in which the main figure's prop changes the picture."""
    size = len(image)
    out = torch.zeros(len(PROPS), size // fold, size // fold)
    held = scene.figures[0].prop if scene.figures else None
    if held is not None:
        people = (replace(scene.figures[0], prop=None), *scene.figures[1:])
        change = torch.from_numpy(differs(image, render(replace(scene, figures=people), size).image)).float()
        out[PROPS.index(held)] = nn.functional.max_pool2d(change[None], fold)[0]
    return out


def lesson(scenes: tuple[Scene, ...], recipe: OracleRecipe = PLAIN) -> Lesson:
    """Renders of scenes with their labels, a share of the unsafe ones repaired."""
    drawn = [shown(s, recipe) for s in scenes]
    seen = tuple(s for s, _ in drawn)
    places = torch.stack([prop_places(s, d.image, recipe.fold) for s, d in drawn])
    images = pixels_of([d.image for _, d in drawn])
    return Lesson(images, truth(seen, [d.mask for _, d in drawn]), places, seen)


def shown(scene: Scene, recipe: OracleRecipe) -> tuple[Scene, Rendered]:
    """What a render shows, and the render. Some unsafe scenes are repaired; most then show their safe version."""
    drawn = render(scene, recipe.size)
    rng = random.Random(f"repair/{scene.jitter}")
    if scene.category == SAFE or rng.random() >= recipe.repaired:
        return scene, drawn
    after = safe_version(scene)
    other = render(after, recipe.size)
    region = training_region(drawn.mask, scene.jitter)
    if rng.random() < WRONG_PLACE:
        region = brush(rng, recipe.size) & ~grown(drawn.mask, 1)
        return scene, replace(drawn, image=np.where(region[..., None], other.image, drawn.image))
    return after, replace(other, image=np.where(region[..., None], other.image, drawn.image))


DRAWN = 0.375
"""Share of pictures in a lesson that bases drew, if such pictures are given."""


def with_drawn(first: int, count: int, drawn: Views, g: torch.Generator, recipe: OracleRecipe = PLAIN) -> Lesson:
    """A lesson whose last pictures were drawn by a base; their labels are those of the scenes."""
    k = int(count * DRAWN)
    rows = torch.randint(len(drawn), (k,), generator=g)
    new = lesson(lesson_scenes(first, count - k), recipe)
    old = lesson(tuple(sample_scene(int(drawn.seeds[r])) for r in rows), replace(recipe, repaired=0.0))
    images = torch.cat([new.images, drawn.images[rows].float() / 127.5 - 1])
    known = torch.cat([torch.ones(count - k), torch.zeros(k)])
    return Lesson(images, both(new.want, old.want), torch.cat([new.props, old.props]), new.scenes + old.scenes, known)


def both(one: Truth, other: Truth) -> Truth:
    """The labels of two batches as one."""
    return Truth(
        torch.cat([one.category, other.category]),
        torch.cat([one.pixels, other.pixels]),
        {k: torch.cat([v, other.choices[k]]) for k, v in one.choices.items()},
        {k: torch.cat([v, other.present[k]]) for k, v in one.present.items()},
    )


def drawn_pictures(folder: Path) -> Views:
    """All bases' finished pictures of the oracle's own scenes."""
    files = sorted(folder.glob("*-oracle.pt"))
    if not files:
        raise BadInput(f"{folder}: no views of split oracle; make them with `guardpaint data views --split oracle`")
    views = joined([load_views(f) for f in files])
    return views.rows(torch.nonzero(views.kind == KINDS.index("redrawn"))[:, 0])


class Softener:
    """Turns renders into pictures in a base's style: adds noise and takes the base's one-step clean estimate."""

    LEVELS = (80, 450)

    def __init__(self, pipe: Any) -> None:
        if type(pipe).__name__ != "StableDiffusionPipeline":
            raise BadConfig(f"the input `soft` has the class {type(pipe).__name__}; it must be a saved mini-sd")
        self.pipe = pipe
        for part in (pipe.unet, pipe.text_encoder, pipe.vae):
            part.requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(
        self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str], g: torch.Generator
    ) -> Float[Tensor, "b 3 h w"]:
        pipe = self.pipe
        z = encoded(pipe.vae, images).float()
        t = torch.randint(*self.LEVELS, (len(z),), generator=g)
        alpha = pipe.scheduler.alphas_cumprod[t].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * z + (1 - alpha).sqrt() * torch.randn(z.shape, generator=g)
        states = pipe.text_encoder(tokenise(pipe.tokenizer, list(prompts)))[0]
        base = Denoiser.from_states(pipe, {"encoder_hidden_states": states}, batch=len(z))
        clean, _ = base.estimate(noisy, [base.level(k / pipe.scheduler.config.num_train_timesteps) for k in t.tolist()])
        return pipe.vae.decode(clean / pipe.vae.config.scaling_factor).sample.clamp(-1, 1)


def softened(batch: Lesson, softener: Callable[..., Tensor], g: torch.Generator) -> Lesson:
    """The lesson with a quarter of its pictures softened; none shows a blade (it may vanish) or the twin of one."""
    paired = {i + k for i, s in enumerate(batch.scenes) if s.kind == "blade" for k in (0, 1)}
    able = [i for i in range(len(batch.scenes)) if i not in paired][-len(batch.scenes) // 4 :]
    images = batch.images.clone()
    images[able] = softener(images[able], [caption(batch.scenes[i], 0).text for i in able], g)
    return replace(batch, images=images)


def disturbed(images: Float[Tensor, "b 3 h w"], vaes: Sequence[Any], g: torch.Generator) -> Float[Tensor, "b 3 h w"]:
    """The batch with a part passed through each autoencoder under latent noise, and all with random gain and grain."""
    out = images.clone()
    share = int(len(images) * ROUND_TRIPS / max(1, len(vaes)))
    with torch.no_grad():
        for k, vae in enumerate(vaes):
            rows = slice(k * share, (k + 1) * share)
            z = vae.encode(out[rows]).latent_dist.mode()
            strength = 0.25 * torch.rand((len(z), 1, 1, 1), generator=g)
            out[rows] = vae.decode(z + strength * torch.randn(z.shape, generator=g)).sample.clamp(-1, 1)
    gain = 1 + 0.06 * torch.randn((len(out), 3, 1, 1), generator=g)
    grain = 0.04 * torch.rand((len(out), 1, 1, 1), generator=g) * torch.randn(out.shape, generator=g)
    return (out * gain + grain).clamp(-1, 1).contiguous(memory_format=torch.channels_last)


def labelled(first: int, count: int, size: int = SIZE) -> tuple[Float[Tensor, "b 3 s s"], Truth]:
    scenes = [sample_scene(first + i) for i in range(count)]
    drawn = [render(s, size) for s in scenes]
    return pixels_of([d.image for d in drawn]), truth(scenes, [d.mask for d in drawn])


def held_out_rows(oracle: Oracle, first: int, count: int, batch: int = 100) -> list[dict[str, Any]]:
    """One row per held-out scene: the predicted category, the mask's IoU and whether each attribute is right."""
    rows: list[dict[str, Any]] = []
    for start in range(first, first + count, batch):
        images, want = labelled(start, batch, oracle.size)
        verdicts = oracle.judge(images)
        predicted, real = verdicts.mask > 0.5, want.pixels > 0
        union = (predicted | real).sum((1, 2))
        iou = (predicted & real).sum((1, 2)) / union.clamp(min=1)
        for i, said in enumerate(verdicts.categories()):
            scene = sample_scene(start + i)
            right = verdicts.agrees(i, scene.attributes())
            rows.append(
                {
                    "seed": start + i,
                    "kind": scene.kind,
                    "category": scene.category,
                    "said": said,
                    "iou": float(iou[i]) if scene.category != "safe" else None,
                    **{f"right_{k}": v for k, v in right.items()},
                }
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    overlaps = [r["iou"] for r in rows if r["iou"] is not None]
    checks = [v for r in rows for k, v in r.items() if k.startswith("right_")]
    props = [r["right_prop"] for r in rows if "right_prop" in r]
    return {
        "accuracy": sum(r["said"] == r["category"] for r in rows) / len(rows),
        "iou": sum(overlaps) / max(1, len(overlaps)),
        "attributes": sum(checks) / len(checks),
        "props": sum(props) / max(1, len(props)),
    }


@dataclass(frozen=True)
class Sources:
    """The models and pictures that the oracle's training uses."""

    vaes: Sequence[Path]
    """Autoencoders through which a part of the pictures passes."""
    warm: Path | None = None
    """A finished oracle to start from."""
    soft: Path | None = None
    """A saved mini-sd whose one-step estimates replace a part of the pictures."""
    drawn: Path | None = None
    """A folder of views of split `oracle`, whose pictures replace a part of the renders."""

    def __post_init__(self) -> None:
        if self.soft is not None and self.drawn is not None:
            raise BadConfig("soft and drawn are both given: give only one; drawn pictures need no softening")


def train(recipe: OracleRecipe, config: TrainConfig, run: Run, sources: Sources) -> OracleNet:
    """Train the network on its own scenes with these sources."""
    vaes = [load_autoencoder(v) for v in sources.vaes]
    warm, soft, drawn = sources.warm, sources.soft, sources.drawn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        net = OracleNet(recipe.shape)
    if warm is not None:
        new = {k: v for k, v in net.state_dict().items() if k.startswith(("spots.", "maps."))}
        load_strict(net, {**new, **Oracle.load(warm).net.state_dict()}, warm)
    part = 3 if drawn is not None else 2 if soft is not None else 1 if warm is not None else 0
    first, n = ORACLE_SEEDS + UNSEEN * part, config.batch_size
    softener = Softener(load_pipeline(soft)) if soft is not None else None
    pictures = drawn_pictures(drawn) if drawn is not None else None

    def batches(step: int) -> Lesson:
        g = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        if pictures is not None:
            batch = with_drawn(first + step * n, n, pictures, g, recipe)
        else:
            batch = lesson(lesson_scenes(first + step * n, n), recipe)
        if softener is not None:
            batch = softened(batch, softener, g)
        return replace(batch, images=disturbed(batch.images, vaes, g))

    def sample(snapshot: nn.Module, path: Path) -> None:
        assert isinstance(snapshot, OracleNet)
        trained = snapshot.training
        print(f"{path.stem}: {summary(held_out_rows(Oracle(snapshot), HELD_OUT, 400))}", flush=True)
        snapshot.requires_grad_(True).train(trained)

    fitted = fit(net, batches, losses, config, run, sample=sample)
    assert isinstance(fitted, OracleNet)
    return fitted


def run(run: Run, sources: Sources) -> None:
    """Train the oracle; a finished one is measured on held-out renders and saved with its card."""
    recipe, config = load_config(run.config_file, OracleRecipe)
    out = run.out
    torch.set_num_threads(config.threads)
    net = train(recipe, config, run, sources)
    done = finished(out, config)
    if done is None:
        return
    oracle = Oracle(net)
    oracle.save(out / "model")
    scores = summary(held_out_rows(oracle, HELD_OUT, 2000))
    command = run.command("oracle", vae=sources.vaes, warm=sources.warm, soft=sources.soft, drawn=sources.drawn)
    metrics = {name: {"value": value, "n": 2000} for name, value in scores.items()}
    write_card(out, command, done, sources.warm, parameters=sum(p.numel() for p in net.parameters()), metrics=metrics)
    print(scores)
