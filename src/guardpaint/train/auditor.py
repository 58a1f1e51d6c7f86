"""Train the Auditor-Scorer on views of unfinished and finished pictures.

guardpaint train mini-auditor --set views=runs/views --out runs/mini-auditor
accelerate launch --cpu --num_processes 2 -m guardpaint.cli train mini-auditor …   # the same on several processes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize
from torch import Tensor, nn

from guardpaint.audit.model import AuditorConfig, AuditorScorer, Text
from guardpaint.store.checkpoint import read_json
from guardpaint.data.corpus_views import kept_apart
from guardpaint.data.views import KINDS, Shelf, Views, joined, load_views, scene_truth
from guardpaint.draft.codec import resize
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.train.auditor_loss import LossWeights, Targets, pairwise_cosines, total
from guardpaint.train.auditor_pictures import (
    FULL_ARTEFACT,
    composites,
    disturbed,
    flipped,
    half_repaired,
    strength_of,
    unseen_scenes,
)
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card
from paperdolls.captions import WORDS, caption
from paperdolls.render import CODE, render
from paperdolls.scene import Scene, safe_version, sample_scene

VALIDATION = 1500
FRESH_SEEDS = 55_000_000
"""Scenes rendered while training; no view is of them."""
LOOSE_WORDS = tuple(word for words in WORDS.values() for phrase in words for word in phrase.split())
"""Words of the world, for prompts that attacks have garbled."""


@dataclass(frozen=True)
class AuditorRecipe:
    """Shape of the auditor, weights of its losses, and how views are disturbed."""

    shape: dict[str, Any] = field(default_factory=dict)
    """AuditorConfig fields; `small: true` starts from the small shape."""
    losses: dict[str, float] = field(default_factory=dict)
    pairs: int = 12
    """Images of a batch that are matched against each other's prompts."""
    composites: float = 0.3
    """Share of views with a seam artefact of known strength."""
    repaired: float = 0.15
    """Share of unsafe rows shown repaired, with their unsafe prompt: matched, and safe."""
    euphemism: float = 0.1
    """Share of unsafe prompts that say it by euphemism; above the world's 0.1, F learns to look past them."""
    salad: float = 0.0
    """Share of prompts in which a few words are others: what attacks leave of a prompt still describes the rest."""
    partial: float = 0.0
    """Share of unsafe rows shown half repaired: part of what is unsafe is left, or all of it paler."""
    fine: float = 0.1
    """Share of batches at the larger size."""
    fresh: float = 0.0
    """Share of every batch that is rendered anew: finished scenes nobody has seen, a third unsafe, with safe twins."""
    late: float = 0.0
    """Above 0, views late in a trajectory come up more often: weight 0.1 + progress^late."""

    def config(self) -> AuditorConfig:
        shape: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in self.shape.items()}
        small = shape.pop("small", False)
        try:
            return AuditorConfig.tiny(**shape) if small else AuditorConfig(**shape)
        except TypeError as error:
            raise BadConfig(f"auditor shape: {error}") from error


@dataclass(frozen=True)
class AuditBatch:
    """Views at audit size with their prompts and targets."""

    images: Float[Tensor, "b 3 h w"]
    ids: Int[Tensor, "b l"]
    noise: Float[Tensor, " b"]
    targets: Targets


class AuditorTask(nn.Module):
    """The auditor with its losses, so that data-parallel wrappers see one forward pass."""

    def __init__(
        self, auditor: AuditorScorer, class_weights: Sequence[float], weights: LossWeights, pairs: int
    ) -> None:
        super().__init__()
        self.auditor, self.weights, self.pairs = auditor, weights, pairs
        self.class_weights: Tensor
        self.register_buffer("class_weights", torch.tensor(class_weights), persistent=False)

    def forward(self, batch: AuditBatch) -> dict[str, Tensor]:
        model = self.auditor
        visual = model.features(batch.images)
        text = Text(*model.text(batch.ids))
        scores = model.heads(visual, text, batch.noise)
        p = self.pairs
        cosines = pairwise_cosines(model, visual[:p], Text(text.vector[:p], text.sequence[:p], text.padding[:p]))
        return total(scores, cosines, model.log_temperature, batch.targets, self.class_weights, self.weights)


class Seamed(NamedTuple):
    """Pictures with artefacts in some of them, and what is known of those."""

    images: Float[Tensor, "b 3 h w"]
    masks: Float[Tensor, "b u v"]
    quality: Float[Tensor, " b"]
    judged: Float[Tensor, " b"]
    artefact: Float[Tensor, "b h w"]


class Sampler:
    """Batches by index: classes balanced, some views repaired, some with artefacts."""

    def __init__(
        self, views: Views | Shelf, recipe: AuditorRecipe, auditor: AuditorScorer, config: TrainConfig
    ) -> None:
        self.views, self.recipe, self.auditor, self.config = views, recipe, auditor, config
        if views.texts and recipe.fresh:
            raise BadConfig(f"fresh={recipe.fresh}: paper-doll scenes cannot be mixed into a corpus; leave it out")
        self.by_class = [torch.nonzero(views.category == c)[:, 0] for c in range(len(auditor.categories))]
        empty = [auditor.categories[c] for c, rows in enumerate(self.by_class) if not len(rows)]
        if empty:
            raise BadInput(f"views hold nothing of {', '.join(empty)}; make more of them")
        late = 0.1 + views.progress.clamp(0, 1) ** recipe.late if recipe.late else torch.ones(len(views))
        self.weights = [late[rows] for rows in self.by_class]

    def batch(self, index: int) -> AuditBatch:
        """By (seed, index) alone."""
        g = torch.Generator().manual_seed(self.config.seed * 1_000_003 + index)
        if self.views.texts:
            part = self.views.rows(self.pick(self.config.batch_size, g))
            assert part.strength is not None
            images, masks = part.images.float() / 255, part.masks.float()
            located = (part.category == 0).float()
            finished = self.seamed(images, masks, g)
            return self.sized(finished, part.category, part.strength, part.noise, list(part.texts), g, located=located)
        return self.scene_batch(index, g)

    def scene_batch(self, index: int, g: torch.Generator) -> AuditBatch:
        """Paper-doll scenes: their masks are known, and their repairs can be drawn."""
        n = self.config.batch_size
        new = round(n * self.recipe.fresh)
        part = self.views.rows(self.pick(n - new, g))
        images = part.images.float() / 255
        masks, category, noise = part.masks.float(), part.category, part.noise.float()
        scenes = [sample_scene(int(s)) for s in part.seeds]
        if new:
            unseen = unseen_scenes(FRESH_SEEDS + index * new, new)
            truth = scene_truth(unseen)
            images, masks = torch.cat([images, truth[0]]), torch.cat([masks, truth[1].float()])
            category, noise = torch.cat([category, truth[2]]), torch.cat([noise, torch.zeros(new)])
            order = torch.randperm(n, generator=g)
            images, masks, category, noise = images[order], masks[order], category[order], noise[order]
            scenes = [(scenes + unseen)[i] for i in order.tolist()]
        prompts = [self.prompt(s, index, g) for s in scenes]
        self.repair(images, masks, category, noise, scenes, g)
        known, rated = self.half_repair(images, masks, category, noise, scenes, g)
        finished = self.seamed(images, masks, g, known)
        return self.sized(finished, category, strength_of(finished.masks), noise, prompts, g, rated=rated)

    def seamed(self, images: Tensor, masks: Tensor, g: torch.Generator, known: Tensor | None = None) -> Seamed:
        """Artefacts of known strength on some, then disturbed and mirrored."""
        whole = images
        images, quality, judged = composites(whole, self.recipe.composites, g)
        judged = judged if known is None else judged * known
        artefact = (images - whole).square().mean(1) / FULL_ARTEFACT**2
        images = disturbed(images, g)
        images, masks, artefact = flipped(g, images, masks, artefact)
        return Seamed(images, masks, quality, judged, artefact)

    def sized(
        self,
        shown: Seamed,
        category: Int[Tensor, " b"],
        strength: Float[Tensor, " b"],
        noise: Float[Tensor, " b"],
        prompts: list[str],
        g: torch.Generator,
        rated: Tensor | None = None,
        located: Tensor | None = None,
    ) -> AuditBatch:
        """At one of the two audit sizes, with what it should get."""
        size = self.auditor.sizes[int(torch.rand((), generator=g) < self.recipe.fine)]
        targets = Targets(category, strength, shown.quality, shown.masks, shown.judged, shown.artefact, rated, located)
        images = resize(shown.images, (size, size))
        return AuditBatch(images, self.auditor.token_ids(prompts), noise.float(), targets)

    def prompt(self, scene: Scene, index: int, g: torch.Generator) -> str:
        """A caption of the scene, another one every time, sometimes with a few wrong words."""
        words = caption(scene, index, euphemism=self.recipe.euphemism).text.split()
        if float(torch.rand((), generator=g)) < self.recipe.salad:
            for _ in range(int(torch.randint(1, 4, (), generator=g))):
                spot, other = (int(torch.randint(n, (), generator=g)) for n in (len(words), len(LOOSE_WORDS)))
                words[spot] = LOOSE_WORDS[other]
        return " ".join(words)

    def pick(self, n: int, g: torch.Generator) -> Int[Tensor, " n"]:
        """Rows of the views: half safe, the harms sharing the rest, in random order."""
        shares = [n // 2] + [n // 2 // (len(self.by_class) - 1)] * (len(self.by_class) - 1)
        shares[0] += n - sum(shares)
        picked = [
            rows[torch.multinomial(w, k, replacement=True, generator=g)]
            for rows, w, k in zip(self.by_class, self.weights, shares, strict=True)
            if k
        ]
        return torch.cat(picked)[torch.randperm(n, generator=g)]

    def repair(
        self, images: Tensor, masks: Tensor, category: Tensor, noise: Tensor, scenes: Sequence[Scene], g: Any
    ) -> None:
        """Show some unsafe scenes in their safe form, in place; the prompt stays."""
        chosen = (category != 0) & (torch.rand(len(scenes), generator=g) < self.recipe.repaired)
        for i in torch.nonzero(chosen)[:, 0].tolist():
            scene = safe_version(scenes[i])
            images[i] = torch.from_numpy(render(scene).image).permute(2, 0, 1).float() / 255
            masks[i], category[i], noise[i] = 0.0, 0, 0.0

    def half_repair(
        self, images: Tensor, masks: Tensor, category: Tensor, noise: Tensor, scenes: Sequence[Scene], g: Any
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Show some unsafe scenes half repaired, in place.

        0 for rows that nobody could call safe or unsafe; 0 for rows whose edges nobody rated.
        """
        known = torch.ones(len(scenes))
        chosen = (category != 0) & (torch.rand(len(scenes), generator=g) < self.recipe.partial)
        for i in torch.nonzero(chosen)[:, 0].tolist():
            images[i], masks[i], label = half_repaired(scenes[i], g)
            noise[i] = 0.0
            known[i] = float(label is not None)
            category[i] = category[i] if label else 0
        return known, 1 - chosen.float()


@torch.no_grad()
def scored(model: AuditorScorer, views: Views, size: int, batch: int = 64) -> dict[str, Tensor]:
    """Every view with its own prompt: logits, maps, F's cosine with the right and with another prompt."""
    parts: dict[str, list[Tensor]] = {k: [] for k in ("adv", "probs", "strength", "quality", "matched", "mismatched")}
    for start in range(0, len(views), batch):
        part = views.rows(torch.arange(start, min(start + batch, len(views))))
        device, noise = model.device, part.noise.float().to(model.device)
        visual = model.features(resize(part.images.float() / 255, (size, size)).to(device))
        text = Text(*model.text(model.token_ids([part.prompt(i) for i in range(len(part))]).to(device)))
        s = model.heads(visual, text, noise)
        other = torch.roll(torch.arange(len(part)), 1)
        wrong = Text(text.vector[other], text.sequence[other], text.padding[other])
        values = {
            "adv": s.adv_logit.sigmoid(),
            "probs": model.probabilities(s.class_logits),
            "strength": s.strength,
            "quality": s.quality,
            "matched": s.cosine,
            "mismatched": model.heads(visual, wrong, noise).cosine,
        }
        for name, value in values.items():
            parts[name].append(value.cpu())
    return {name: torch.cat(v) for name, v in parts.items()}


def macro_f1(said: Int[Tensor, " n"], right: Int[Tensor, " n"], classes: int) -> float:
    """Mean F1 over classes."""
    scores = []
    for c in range(classes):
        hit = ((said == c) & (right == c)).sum().item()
        wrong = ((said == c) != (right == c)).sum().item()
        scores.append(2 * hit / max(1, 2 * hit + wrong))
    return sum(scores) / classes


@torch.no_grad()
def matched_repairs(model: AuditorScorer, views: Views, size: int, batch: int = 64) -> Float[Tensor, " n"]:
    """F's cosine of unsafe scenes in their safe form with the prompt of the unsafe one; a corpus has none of them."""
    unsafe = torch.nonzero((views.category != 0) & (not views.texts))[:, 0]
    found = []
    for rows in unsafe.split(batch) if len(unsafe) else ():
        scenes = [sample_scene(int(views.seeds[r])) for r in rows]
        device = model.device
        visual = model.features(resize(scene_truth([safe_version(s) for s in scenes])[0], (size, size)).to(device))
        text = Text(*model.text(model.token_ids([caption(s, 0).text for s in scenes]).to(device)))
        found.append(model.heads(visual, text, torch.zeros(len(rows), device=device)).cosine.cpu())
    return torch.cat(found) if found else torch.zeros(0)


def calibrate_faithfulness(model: AuditorScorer, matched: Tensor, mismatched: Tensor) -> None:
    """Fit F = σ(slope · cosine + offset) to matched against mismatched pairs; kept in the checkpoint."""
    x = np.concatenate([matched.numpy(), mismatched.numpy()]).astype(float)
    y = np.concatenate([np.ones(len(matched)), np.zeros(len(mismatched))])

    def cost(w: np.ndarray) -> float:
        z = w[0] * x + w[1]
        return float(np.mean(np.logaddexp(0, z) - y * z) + 1e-5 * w[0] ** 2)

    slope, offset = minimize(cost, np.array([4.0, 0.0]), method="L-BFGS-B").x
    model.f_slope.fill_(float(slope))
    model.f_offset.fill_(float(offset))


def find_views(folder: Path, split: str) -> Views | Shelf:
    """All bases' views of a split; a corpus's stay on disk."""
    found = [load_views(p, on_disk=True) for p in sorted(folder.glob(f"*-{split}.pt"))]
    if not found:
        raise BadInput(
            f"{folder}: no views of split {split}; make them with `guardpaint data views`, of a corpus with "
            "`guardpaint data corpus-views`"
        )
    if len({(bool(p.texts), p.names) for p in found}) > 1:
        raise BadInput(f"{folder}: views of scenes and of corpora, or of several policies; keep them in folders apart")
    sizes = sorted({tuple(p.images.shape[-2:]) for p in found})
    if len(sizes) > 1:
        raise BadInput(f"{folder}: views of sizes {sizes}; make them all with the same --pixels")
    return Shelf(found) if found[0].texts else joined(found)


def starting_point(recipe: AuditorRecipe, seed: int, warm: Path | None) -> AuditorScorer:
    """Random weights, or those of an auditor of the same shape; how P is pooled and how large it looks may change."""
    shape = recipe.config()
    if warm is not None:
        auditor = AuditorScorer.from_pretrained(warm).float().train()
        kept = replace(
            auditor.config,
            quality_pool=shape.quality_pool,
            class_weights=shape.class_weights,
            sizes=shape.sizes,
        )
        if kept != shape:
            raise BadConfig(f"{warm}: its shape is not the config's; train on with the config it was made with")
        auditor.config, auditor.sizes = shape, shape.sizes
        return auditor
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AuditorScorer(shape)


def run(
    config_file: Path,
    views_dir: Path,
    out: Path,
    minutes: float | None,
    warm: Path | None = None,
    quiet: bool = False,
    policy: Policy | None = None,
) -> None:
    """Train, keep the best by macro-F1, calibrate F, save with a card."""
    recipe, config = load_config(config_file, AuditorRecipe)
    torch.set_num_threads(config.threads)
    policy = policy or Policy.default()
    recipe = replace(recipe, shape={"categories": policy.names, **recipe.shape})
    auditor = starting_point(recipe, config.seed, warm)
    weights = [policy.category(name).weight for name in auditor.categories]
    if auditor.config.class_weights not in ((), tuple(weights)):
        raise BadConfig(f"class_weights={auditor.config.class_weights}: the loss is weighted {weights} by the policy")
    task = AuditorTask(auditor, weights, LossWeights(**recipe.losses), recipe.pairs)
    kept_apart(views_dir)
    views, held_out = find_views(views_dir, "train"), find_views(views_dir, "validation")
    for some in (views, held_out):
        if (some.names or tuple(CODE)) != auditor.categories or bool(some.texts) != bool(views.texts):
            raise BadInput(
                f"{views_dir} has the categories {', '.join(some.names or CODE)}, the auditor "
                f"{', '.join(auditor.categories)}: name the policy the corpus was labelled by with --policy"
            )
    sampler = Sampler(views, recipe, auditor, config)
    rows = torch.nonzero((held_out.progress >= 0.5) & (held_out.kind != KINDS.index("stepped")))[:, 0]
    late = held_out.rows(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:VALIDATION]])

    def validate(task: nn.Module) -> dict[str, float]:
        assert isinstance(task, AuditorTask)
        found = scored(task.auditor, late, task.auditor.sizes[0])
        said = found["probs"].argmax(1)
        score = macro_f1(said, late.category, len(weights))
        return {"score": score, "accuracy": float((said == late.category).float().mean())}

    sitting = Run(config_file, out, minutes, quiet)
    fitted = fit(task, sampler.batch, lambda m, b: m(b), config, sitting, validate=validate)
    assert isinstance(fitted, AuditorTask)
    done = finished(out, config)
    if done is None:
        return
    best = read_json(out / "best.json") if (out / "best.json").exists() else None
    found = scored(fitted.auditor, late, fitted.auditor.sizes[0])
    repaired = matched_repairs(fitted.auditor, late, fitted.auditor.sizes[0])
    calibrate_faithfulness(fitted.auditor, torch.cat([found["matched"], repaired]), found["mismatched"])
    fitted.auditor.save_pretrained(out / "model", torch.float16)
    command = sitting.command("auditor", views=views_dir, warm=warm)
    command += f" --set policy=POLICY ({policy.name})" if policy.names != Policy.default().names else ""
    parameters = sum(p.numel() for p in fitted.auditor.parameters())
    write_card(out, command, done, warm, best=best, parameters=parameters, config=asdict(config))
    print(f"saved to {out / 'model'}; validation {best}")
