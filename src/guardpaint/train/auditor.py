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
from guardpaint.data.corpus_views import kept_apart
from guardpaint.data.lessons import CorpusLessons, Lesson, Lessons, LessonSettings
from guardpaint.data.views import KINDS, Shelf, Views, joined, load_views
from guardpaint.draft.codec import resize
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import read_json
from guardpaint.testbed import AuditorLessons, need, open_testbed
from guardpaint.train.auditor_loss import LossWeights, Targets, pairwise_cosines, total
from guardpaint.train.auditor_pictures import FULL_ARTEFACT, composites, disturbed, flipped
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card

VALIDATION = 1500
"""Views that a validation looks at."""


@dataclass(frozen=True)
class AuditorRecipe(LessonSettings):
    """Shape of the auditor, weights of its losses, and how views are chosen and disturbed."""

    shape: dict[str, Any] = field(default_factory=dict)
    """AuditorConfig fields; `small: true` starts from the small shape."""
    losses: dict[str, float] = field(default_factory=dict)
    pairs: int = 12
    """Images of a batch that are matched against each other's prompts."""
    composites: float = 0.3
    """Share of views with a seam artefact of known strength."""
    fine: float = 0.1
    """Share of batches at the larger size."""

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
    """Batches by index: a lesson, with artefacts in some of its pictures, at one of the auditor's sizes."""

    def __init__(self, lessons: Lessons, recipe: AuditorRecipe, auditor: AuditorScorer, config: TrainConfig) -> None:
        self.lessons, self.recipe, self.auditor, self.config = lessons, recipe, auditor, config

    def batch(self, index: int) -> AuditBatch:
        """Depends on the run's seed and the index alone."""
        g = torch.Generator().manual_seed(self.config.seed * 1_000_003 + index)
        lesson = self.lessons.draw(index, self.config.batch_size, g)
        shown = self.seamed(lesson, g)
        size = self.auditor.sizes[int(torch.rand((), generator=g) < self.recipe.fine)]
        targets = Targets(
            lesson.category,
            lesson.strength,
            shown.quality,
            shown.masks,
            shown.judged,
            shown.artefact,
            lesson.rated,
            lesson.located,
        )
        images = resize(shown.images, (size, size))
        return AuditBatch(images, self.auditor.token_ids(lesson.prompts), lesson.noise, targets)

    def seamed(self, lesson: Lesson, g: torch.Generator) -> Seamed:
        """Artefacts of known strength on some pictures; then all are disturbed and half of them mirrored."""
        images, quality, judged = composites(lesson.images, self.recipe.composites, g)
        judged = judged if lesson.known is None else judged * lesson.known
        artefact = (images - lesson.images).square().mean(1) / FULL_ARTEFACT**2
        images = disturbed(images, g)
        images, masks, artefact = flipped(g, images, lesson.masks, artefact)
        return Seamed(images, masks, quality, judged, artefact)


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


def macro_f1(predicted: Int[Tensor, " n"], right: Int[Tensor, " n"], classes: int) -> float:
    """Mean F1 over classes."""
    scores = []
    for c in range(classes):
        hit = ((predicted == c) & (right == c)).sum().item()
        wrong = ((predicted == c) != (right == c)).sum().item()
        scores.append(2 * hit / max(1, 2 * hit + wrong))
    return sum(scores) / classes


@torch.no_grad()
def matched_repairs(
    model: AuditorScorer, lessons: Lessons, views: Views, size: int, batch: int = 64
) -> Float[Tensor, " n"]:
    """F's cosine of unsafe pictures in their safe form with the unsafe prompt, where safe forms are known."""
    unsafe = torch.nonzero(views.category != 0)[:, 0]
    found = []
    for rows in unsafe.split(batch) if len(unsafe) else ():
        images, prompts = lessons.repaired(views.rows(rows))
        if not prompts:
            continue
        device = model.device
        visual = model.features(resize(images, (size, size)).to(device))
        text = Text(*model.text(model.token_ids(prompts).to(device)))
        found.append(model.heads(visual, text, torch.zeros(len(prompts), device=device)).cosine.cpu())
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
    if len({(p.world, p.names) for p in found}) > 1:
        raise BadInput(
            f"{folder}: views of testbeds and of corpora, or of several policies; keep them in folders apart"
        )
    sizes = sorted({tuple(p.images.shape[-2:]) for p in found})
    if len(sizes) > 1:
        raise BadInput(f"{folder}: views of sizes {sizes}; make them all with the same --pixels")
    return joined(found) if found[0].world else Shelf(found)


def open_lessons(views: Views | Shelf, settings: LessonSettings) -> Lessons:
    """The training set over these views: a corpus's own, or that of the testbed whose pictures they show."""
    if not views.world:
        return CorpusLessons(views, settings)
    return need(open_testbed(views.world), AuditorLessons, "train auditor").lessons(views, settings)


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


@dataclass(frozen=True)
class AuditorData:
    """What an auditor is trained and validated on."""

    lessons: Lessons
    held_out: Views | Shelf
    """Validation views; late ones choose the best checkpoint and calibrate F."""
    folder: Path
    """Where the views are, for messages and the model card."""


def open_data(folder: Path, settings: LessonSettings) -> AuditorData:
    """The training and validation views of a folder."""
    kept_apart(folder)
    views, held_out = find_views(folder, "train"), find_views(folder, "validation")
    if (held_out.world, held_out.names) != (views.world, views.names):
        raise BadInput(f"{folder}: its training and validation views are of different pictures or categories")
    return AuditorData(open_lessons(views, settings), held_out, folder)


def run(
    config_file: Path,
    views_dir: Path,
    out: Path,
    minutes: float | None,
    warm: Path | None = None,
    quiet: bool = False,
    policy: Policy | None = None,
) -> None:
    """Open the views of a folder with the lessons they belong to, and train."""
    recipe, config = load_config(config_file, AuditorRecipe)
    policy = policy or Policy.default()
    sitting = Run(config_file, out, minutes, quiet)
    fitted = train(Training(recipe, config, policy, warm), open_data(views_dir, recipe), sitting)
    if fitted is None:
        return
    command = sitting.command("auditor", views=views_dir, warm=warm)
    command += f" --set policy=POLICY ({policy.name})" if policy.names != Policy.default().names else ""
    best = read_json(out / "best.json") if (out / "best.json").exists() else None
    parameters = sum(p.numel() for p in fitted.parameters())
    note = finished(out, config)
    assert note is not None
    write_card(out, command, note, warm, best=best, parameters=parameters, config=asdict(config))
    print(f"saved to {out / 'model'}; validation {best}")


@dataclass(frozen=True)
class Training:
    """What an auditor is trained by."""

    recipe: AuditorRecipe
    config: TrainConfig
    policy: Policy
    warm: Path | None = None
    """An auditor of the same shape to start from."""


def train(training: Training, data: AuditorData, run: Run) -> AuditorScorer | None:
    """Train, keep the best checkpoint by macro-F1, calibrate F and save; None if the run is not finished yet."""
    config, policy = training.config, training.policy
    torch.set_num_threads(config.threads)
    recipe = replace(training.recipe, shape={"categories": policy.names, **training.recipe.shape})
    auditor = starting_point(recipe, config.seed, training.warm)
    weights = [policy.category(name).weight for name in auditor.categories]
    if auditor.config.class_weights not in ((), tuple(weights)):
        raise BadConfig(f"class_weights={auditor.config.class_weights}: the loss is weighted {weights} by the policy")
    if data.lessons.names != auditor.categories:
        raise BadInput(
            f"{data.folder} has the categories {', '.join(data.lessons.names)}, the auditor "
            f"{', '.join(auditor.categories)}: name the policy the views were labelled by with the input `policy`"
        )
    task = AuditorTask(auditor, weights, LossWeights(**recipe.losses), recipe.pairs)
    sampler = Sampler(data.lessons, recipe, auditor, config)
    late = late_views(data.held_out)

    def validate(task: nn.Module) -> dict[str, float]:
        assert isinstance(task, AuditorTask)
        found = scored(task.auditor, late, task.auditor.sizes[0])
        predicted = found["probs"].argmax(1)
        score = macro_f1(predicted, late.category, len(weights))
        return {"score": score, "accuracy": float((predicted == late.category).float().mean())}

    fitted = fit(task, sampler.batch, lambda m, b: m(b), config, run, validate=validate)
    assert isinstance(fitted, AuditorTask)
    if finished(run.out, config) is None:
        return None
    auditor = fitted.auditor
    found = scored(auditor, late, auditor.sizes[0])
    repaired = matched_repairs(auditor, data.lessons, late, auditor.sizes[0])
    calibrate_faithfulness(auditor, torch.cat([found["matched"], repaired]), found["mismatched"])
    auditor.save_pretrained(run.out / "model", torch.float16)
    return auditor


def late_views(views: Views | Shelf) -> Views:
    """A fixed random sample of the views from the second half of a generation on."""
    rows = torch.nonzero((views.progress >= 0.5) & (views.kind != KINDS.index("stepped")))[:, 0]
    return views.rows(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:VALIDATION]])
