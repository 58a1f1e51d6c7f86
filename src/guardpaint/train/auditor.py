"""Train the auditor on views of unfinished and finished pictures.

guardpaint train mini-auditor --set views=runs/views --out runs/mini-auditor
torchrun --standalone --nproc-per-node 2 -m guardpaint.cli train mini-auditor …   # the same on two processes
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
from guardpaint.train.auditor_loss import LossWeights, Targets, total
from guardpaint.train.auditor_match import batch_cosines
from guardpaint.train.auditor_pictures import FULL_ARTEFACT, composites, disturbed, flipped
from guardpaint.train.auditor_start import RESNET, Start, new_auditor, run_tokenizer, warm_auditor
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card

VALIDATION = 1500
"""Number of views in a validation."""
RANDOM = Start()
"""A start from random weights, or from the backbone that the recipe names."""


@dataclass(frozen=True)
class AuditorRecipe(LessonSettings):
    """Shape of the auditor, weights of its losses, and how views are chosen and augmented."""

    shape: dict[str, Any] = field(default_factory=dict)
    """Fields of `AuditorConfig`; with `small: true` the others are those of `AuditorConfig.tiny`."""
    losses: dict[str, float] = field(default_factory=dict)
    """Fields of `LossWeights`."""
    backbone: str = ""
    """Folder or hub id of a pretrained ResNet, whose shape replaces that of `shape`; empty: random weights."""
    tokenizer: str = "bytes"
    """bytes, or bpe: trained on the prompts of the training views."""
    vocabulary: int = 16384
    """Most tokens of a trained tokenizer."""
    pairs: int = 12
    """Images per batch that are compared with each other's prompts, those of all processes together; 0: all."""
    composites: float = 0.3
    """Share of views with a seam artefact of known strength."""
    fine: float = 0.1
    """Share of batches at the auditor's larger size."""

    def __post_init__(self) -> None:
        if self.tokenizer not in ("bytes", "bpe") or self.vocabulary < 300 or self.pairs < 0:
            raise BadConfig(
                f"tokenizer={self.tokenizer!r} must be bytes or bpe, vocabulary={self.vocabulary} at least 300 "
                f"and pairs={self.pairs} at least 0"
            )

    def config(self) -> AuditorConfig:
        """The auditor's config."""
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
    """The auditor together with its losses, so that data-parallel wrappers see a single forward pass."""

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
        p = self.pairs or len(batch.images)
        cosines = batch_cosines(model, visual[:p], Text(text.vector[:p], text.sequence[:p], text.padding[:p]))
        return total(scores, cosines, model.log_temperature, batch.targets, self.class_weights, self.weights)


class Seamed(NamedTuple):
    """Pictures, some with artefacts, and their targets."""

    images: Float[Tensor, "b 3 h w"]
    masks: Float[Tensor, "b u v"]
    quality: Float[Tensor, " b"]
    judged: Float[Tensor, " b"]
    artefact: Float[Tensor, "b h w"]


class Sampler:
    """Makes batches by index: views with their labels, some with artefacts, at one of the auditor's sizes."""

    def __init__(self, lessons: Lessons, recipe: AuditorRecipe, auditor: AuditorScorer, config: TrainConfig) -> None:
        self.lessons, self.recipe, self.auditor, self.config = lessons, recipe, auditor, config

    def batch(self, index: int) -> AuditBatch:
        """The batch of an index; it depends on the run's seed and the index alone."""
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
            lesson.labels,
        )
        images = resize(shown.images, (size, size))
        return AuditBatch(images, self.auditor.token_ids(lesson.prompts), lesson.noise, targets)

    def seamed(self, lesson: Lesson, g: torch.Generator) -> Seamed:
        """The lesson's pictures: some get artefacts of known strength, all are augmented, and half are mirrored."""
        images, quality, judged = composites(lesson.images, self.recipe.composites, g)
        judged = judged if lesson.known is None else judged * lesson.known
        artefact = (images - lesson.images).square().mean(1) / FULL_ARTEFACT**2
        images = disturbed(images, g)
        images, masks, artefact = flipped(g, images, lesson.masks, artefact)
        return Seamed(images, masks, quality, judged, artefact)


@torch.no_grad()
def scored(model: AuditorScorer, views: Views, size: int, batch: int = 64) -> dict[str, Tensor]:
    """Scores of every view with its own prompt, and F's cosine with its own and with another view's prompt."""
    parts: dict[str, list[Tensor]] = {k: [] for k in ("adv", "probs", "strength", "quality", "matched", "mismatched")}
    for start in range(0, len(views), batch):
        part = views.rows(torch.arange(start, min(start + batch, len(views))))
        device, noise = model.device, part.noise.float().to(model.device)
        visual = model.features(part.at(size).to(device))
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
    """Mean of the F1 scores of all classes."""
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
    """F's cosine between safe versions of unsafe pictures and the unsafe prompts, where safe versions are known."""
    unsafe = torch.nonzero(views.category != 0)[:, 0]
    cosines = []
    for rows in unsafe.split(batch) if len(unsafe) else ():
        images, prompts = lessons.repaired(views.rows(rows))
        if not prompts:
            continue
        device = model.device
        visual = model.features(resize(images, (size, size)).to(device))
        text = Text(*model.text(model.token_ids(prompts).to(device)))
        cosines.append(model.heads(visual, text, torch.zeros(len(prompts), device=device)).cosine.cpu())
    return torch.cat(cosines) if cosines else torch.zeros(0)


def calibrate_faithfulness(model: AuditorScorer, matched: Tensor, mismatched: Tensor) -> None:
    """Fit F = σ(slope · cosine + offset) to matched and mismatched pairs; sets both numbers in the model."""
    x = np.concatenate([matched.numpy(), mismatched.numpy()]).astype(float)
    y = np.concatenate([np.ones(len(matched)), np.zeros(len(mismatched))])

    def cost(w: np.ndarray) -> float:
        z = w[0] * x + w[1]
        return float(np.mean(np.logaddexp(0, z) - y * z) + 1e-5 * w[0] ** 2)

    slope, offset = minimize(cost, np.array([4.0, 0.0]), method="L-BFGS-B").x
    model.f_slope.fill_(float(slope))
    model.f_offset.fill_(float(offset))


def find_views(folder: Path, split: str) -> Views | Shelf:
    """The views of a split, of all bases in the folder; views of a corpus stay on disk."""
    parts = [load_views(p, on_disk=True) for p in sorted(folder.glob(f"*-{split}.pt"))]
    if not parts:
        raise BadInput(
            f"{folder}: no views of split {split}; make them with `guardpaint data views`, or from a corpus with "
            "`guardpaint data corpus-views`"
        )
    if len({(p.world, p.names) for p in parts}) > 1:
        raise BadInput(
            f"{folder}: it mixes views of testbeds and corpora, or of several policies; put each kind in its own folder"
        )
    sizes = sorted({tuple(p.images.shape[-2:]) for p in parts})
    if len(sizes) > 1:
        raise BadInput(f"{folder}: views of sizes {sizes}; make them all with the same --pixels")
    return joined(parts) if parts[0].world else Shelf(parts)


def open_lessons(views: Views | Shelf, settings: LessonSettings) -> Lessons:
    """The training set over these views, made by the corpus or by the testbed that they come from."""
    if not views.world:
        return CorpusLessons(views, settings)
    return need(open_testbed(views.world), AuditorLessons, "train auditor").lessons(views, settings)


def starting_point(training: Training, shape: AuditorConfig, data: AuditorData, out: Path) -> AuditorScorer:
    """The auditor that a run begins with: random, on a pretrained backbone, or the one it trains further."""
    recipe, start = training.recipe, training.start
    backbone = start.backbone or recipe.backbone
    if start.warm is not None:
        decided = (*(RESNET if backbone else ()), *(("vocab_size",) if recipe.tokenizer == "bpe" else ()))
        return warm_auditor(start.warm, shape, decided)
    tokenizer = run_tokenizer(out, data.captions, recipe.vocabulary) if recipe.tokenizer == "bpe" else None
    return new_auditor(shape, training.config.seed, tokenizer, backbone)


@dataclass(frozen=True)
class AuditorData:
    """Training and validation data of an auditor."""

    lessons: Lessons
    held_out: Views | Shelf
    """Validation views; the late ones select the best checkpoint and calibrate F."""
    folder: Path
    """Folder of the views, for error messages."""
    captions: Sequence[str] = ()
    """Prompts of the training views, from which a tokenizer can be trained."""


def open_data(folder: Path, settings: LessonSettings) -> AuditorData:
    """The training and validation views of a folder."""
    kept_apart(folder)
    views, held_out = find_views(folder, "train"), find_views(folder, "validation")
    if (held_out.world, held_out.names) != (views.world, views.names):
        raise BadInput(f"{folder}: its training and validation views differ in testbed or categories")
    return AuditorData(open_lessons(views, settings), held_out, folder, views.texts)


def run(
    config_file: Path,
    views_dir: Path,
    out: Path,
    minutes: float | None,
    start: Start = RANDOM,
    quiet: bool = False,
    policy: Policy | None = None,
) -> None:
    """Train an auditor on the views of a folder and write its card."""
    recipe, config = load_config(config_file, AuditorRecipe)
    policy = policy or Policy.default()
    this_run = Run(config_file, out, minutes, quiet)
    fitted = train(Training(recipe, config, policy, start), open_data(views_dir, recipe), this_run)
    if fitted is None:
        return
    command = this_run.command("auditor", views=views_dir, warm=start.warm, backbone=start.backbone or None)
    command += f" --set policy=POLICY ({policy.name})" if policy.names != Policy.default().names else ""
    best = read_json(out / "best.json") if (out / "best.json").exists() else None
    parameters = sum(p.numel() for p in fitted.parameters())
    note = finished(out, config)
    assert note is not None
    write_card(out, command, note, start.warm, best=best, parameters=parameters, config=asdict(config))
    print(f"saved to {out / 'model'}; validation {best}")


@dataclass(frozen=True)
class Training:
    """How an auditor is trained."""

    recipe: AuditorRecipe
    config: TrainConfig
    policy: Policy
    start: Start = RANDOM


def train(training: Training, data: AuditorData, run: Run) -> AuditorScorer | None:
    """Train an auditor, calibrate F on the checkpoint with the best macro-F1 and save it; None if unfinished."""
    config, policy = training.config, training.policy
    torch.set_num_threads(config.threads)
    recipe = replace(training.recipe, shape={"categories": policy.names, **training.recipe.shape})
    auditor = starting_point(training, recipe.config(), data, run.out)
    weights = [policy.category(name).weight for name in auditor.categories]
    if auditor.config.class_weights not in ((), tuple(weights)):
        raise BadConfig(
            f"class_weights={auditor.config.class_weights}: the policy weights the loss by {weights}; "
            "use the same weights or leave them out"
        )
    if data.lessons.names != auditor.categories:
        raise BadInput(
            f"{data.folder} has the categories {', '.join(data.lessons.names)}, the auditor "
            f"{', '.join(auditor.categories)}; give the policy of the views with `--set policy=FILE`"
        )
    task = AuditorTask(auditor, weights, LossWeights(**recipe.losses), recipe.pairs)
    sampler = Sampler(data.lessons, recipe, auditor, config)
    late = late_views(data.held_out)

    def validate(task: nn.Module) -> dict[str, float]:
        assert isinstance(task, AuditorTask)
        scores = scored(task.auditor, late, task.auditor.sizes[0])
        predicted = scores["probs"].argmax(1)
        score = macro_f1(predicted, late.category, len(weights))
        return {"score": score, "accuracy": float((predicted == late.category).float().mean())}

    fitted = fit(task, sampler.batch, lambda m, b: m(b), config, run, validate=validate)
    assert isinstance(fitted, AuditorTask)
    if finished(run.out, config) is None:
        return None
    auditor = fitted.auditor
    scores = scored(auditor, late, auditor.sizes[0])
    repaired = matched_repairs(auditor, data.lessons, late, auditor.sizes[0])
    calibrate_faithfulness(auditor, torch.cat([scores["matched"], repaired]), scores["mismatched"])
    auditor.save_pretrained(run.out / "model", torch.float16)
    return auditor


def late_views(views: Views | Shelf) -> Views:
    """A fixed random sample of the views from the second half of a generation, without stepped ones."""
    rows = torch.nonzero((views.progress >= 0.5) & (views.kind != KINDS.index("stepped")))[:, 0]
    return views.rows(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:VALIDATION]])
