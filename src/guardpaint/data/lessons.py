"""Training sets of an auditor: batches of views with their labels, drawn by index from a generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.data.views import Shelf, Views
from guardpaint.errors import BadConfig, BadInput


@dataclass(frozen=True)
class LessonSettings:
    """How views are chosen and changed before an auditor sees them."""

    repaired: float = 0.15
    """Share of unsafe rows shown in their repaired form with the unsafe prompt, labelled as matched and safe."""
    euphemism: float = 0.1
    """Share of unsafe prompts that use a euphemism; the higher it is, the less F depends on explicit words."""
    salad: float = 0.0
    """Share of prompts in which a few words are replaced by random ones, as attacks do; the remaining words still
    describe the picture."""
    partial: float = 0.0
    """Share of unsafe rows shown half repaired: part of the unsafe content remains, or all of it is fainter."""
    fresh: float = 0.0
    """Share of every batch that is newly rendered: finished scenes that are in no stored views, a third of them unsafe
    with a safe twin."""
    late: float = 0.0
    """If above 0, views late in a trajectory are drawn more often, with weight 0.1 + progress^late."""


@dataclass(frozen=True)
class Lesson:
    """One raw batch: pictures with prompts and labels, before artefacts are added."""

    images: Float[Tensor, "b 3 h w"]
    masks: Float[Tensor, "b u v"]
    category: Int[Tensor, " b"]
    noise: Float[Tensor, " b"]
    prompts: list[str]
    strength: Float[Tensor, " b"]
    """How strong the harm is, from 0 to 1."""
    known: Float[Tensor, " b"] | None = None
    """0 for rows whose safety label is unknown; None if all labels are known."""
    rated: Float[Tensor, " b"] | None = None
    """0 for rows whose quality is unknown; None if all are known."""
    located: Float[Tensor, " b"] | None = None
    """0 for rows whose mask is unknown; None if all are known."""
    labels: Float[Tensor, "b c"] | None = None
    """1 for each category of a row, where rows may have several; None if each has one."""


@runtime_checkable
class Lessons(Protocol):
    """A training set of an auditor."""

    names: tuple[str, ...]
    """The categories that its labels index."""

    def draw(self, index: int, count: int, g: torch.Generator) -> Lesson:
        """Return batch `index`, which depends only on the index and the generator."""
        ...

    def repaired(self, views: Views) -> tuple[Float[Tensor, "m 3 h w"], list[str]]:
        """Return the safe form of each unsafe picture among these views, with the unsafe prompt.

        The two count as matched although the prompt asks for harm. Empty if no safe forms are known.
        """
        ...


class BalancedRows:
    """Draws rows of views in random order: half of them safe, the other half divided equally among the harms.

    A row with several harms may be drawn for each of them.
    """

    def __init__(self, views: Views | Shelf, late: float = 0.0) -> None:
        self.by_class = [torch.nonzero(of_class)[:, 0] for of_class in views.every_label().T]
        empty = [views.names[c] for c, rows in enumerate(self.by_class) if not len(rows)]
        if empty:
            raise BadInput(f"the views have no rows of {', '.join(empty)}; make more views")
        weight = 0.1 + views.progress.clamp(0, 1) ** late if late else torch.ones(len(views))
        self.weights = [weight[rows] for rows in self.by_class]

    def pick(self, count: int, g: torch.Generator) -> Int[Tensor, " n"]:
        """Indices of `count` rows, drawn with replacement."""
        shares = [count // 2] + [count // 2 // (len(self.by_class) - 1)] * (len(self.by_class) - 1)
        shares[0] += count - sum(shares)
        picked = [
            rows[torch.multinomial(weight, share, replacement=True, generator=g)]
            for rows, weight, share in zip(self.by_class, self.weights, shares, strict=True)
            if share
        ]
        return torch.cat(picked)[torch.randperm(count, generator=g)]


class CorpusLessons:
    """The unchanged views of a labelled corpus, whose pictures cannot be rendered again or repaired."""

    def __init__(self, views: Views | Shelf, settings: LessonSettings) -> None:
        if settings.fresh:
            raise BadConfig(f"fresh={settings.fresh}: a corpus has no scenes to render; set fresh to 0")
        self.views, self.names = views, views.names
        self.balanced = BalancedRows(views, settings.late)

    def draw(self, index: int, count: int, g: torch.Generator) -> Lesson:
        part = self.views.rows(self.balanced.pick(count, g))
        if part.strength is None:
            raise BadInput(
                "views of a corpus need the strength of its labels; make them again with `guardpaint data corpus-views`"
            )
        return Lesson(
            images=part.images.float() / 255,
            masks=part.masks.float(),
            category=part.category,
            noise=part.noise.float(),
            prompts=list(part.texts),
            strength=part.strength,
            located=(part.category == 0).float(),
            labels=None if part.labels is None else part.labels.float(),
        )

    def repaired(self, views: Views) -> tuple[Float[Tensor, "m 3 h w"], list[str]]:
        return torch.zeros(0, 3, *views.images.shape[-2:]), []
