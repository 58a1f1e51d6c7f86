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
    """Share of unsafe rows shown repaired, with their unsafe prompt: matched, and safe."""
    euphemism: float = 0.1
    """Share of unsafe prompts that say it by euphemism; the more there are, the less F depends on open words."""
    salad: float = 0.0
    """Share of prompts in which a few words are others: what attacks leave of a prompt still describes the rest."""
    partial: float = 0.0
    """Share of unsafe rows shown half repaired: part of what is unsafe is left, or all of it paler."""
    fresh: float = 0.0
    """Share of every batch that is rendered anew: finished scenes nobody has seen, a third unsafe, with safe twins."""
    late: float = 0.0
    """Above 0, views late in a trajectory come up more often: weight 0.1 + progress^late."""


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
    """0 for rows that nobody could call safe or unsafe; None: all are known."""
    rated: Float[Tensor, " b"] | None = None
    """0 for rows whose quality is not known; None: all are rated."""
    located: Float[Tensor, " b"] | None = None
    """0 for rows whose mask is not known; None: all masks are."""


@runtime_checkable
class Lessons(Protocol):
    """A training set of an auditor."""

    names: tuple[str, ...]
    """The categories that its labels count."""

    def draw(self, index: int, count: int, g: torch.Generator) -> Lesson:
        """Batch `index`; it depends on the index and the generator alone."""
        ...

    def repaired(self, views: Views) -> tuple[Float[Tensor, "m 3 h w"], list[str]]:
        """The unsafe pictures among these views in their safe form, with the prompts of the unsafe ones: pairs that
        match although the prompt asks for harm. Empty where safe forms are not known."""
        ...


class BalancedRows:
    """Draws rows of views: half of them safe, the harms sharing the rest, in random order."""

    def __init__(self, views: Views | Shelf, late: float = 0.0) -> None:
        self.by_class = [torch.nonzero(views.category == c)[:, 0] for c in range(len(views.names))]
        empty = [views.names[c] for c, rows in enumerate(self.by_class) if not len(rows)]
        if empty:
            raise BadInput(f"views hold nothing of {', '.join(empty)}; make more of them")
        weight = 0.1 + views.progress.clamp(0, 1) ** late if late else torch.ones(len(views))
        self.weights = [weight[rows] for rows in self.by_class]

    def pick(self, count: int, g: torch.Generator) -> Int[Tensor, " n"]:
        shares = [count // 2] + [count // 2 // (len(self.by_class) - 1)] * (len(self.by_class) - 1)
        shares[0] += count - sum(shares)
        picked = [
            rows[torch.multinomial(weight, share, replacement=True, generator=g)]
            for rows, weight, share in zip(self.by_class, self.weights, shares, strict=True)
            if share
        ]
        return torch.cat(picked)[torch.randperm(count, generator=g)]


class CorpusLessons:
    """Views of a labelled corpus as they are: nobody can render its pictures anew or repair them."""

    def __init__(self, views: Views | Shelf, settings: LessonSettings) -> None:
        if settings.fresh:
            raise BadConfig(f"fresh={settings.fresh}: a corpus has no scenes to render anew; leave it out")
        self.views, self.names = views, views.names
        self.balanced = BalancedRows(views, settings.late)

    def draw(self, index: int, count: int, g: torch.Generator) -> Lesson:
        part = self.views.rows(self.balanced.pick(count, g))
        if part.strength is None:
            raise BadInput("views of a corpus need the strength of its labels; make them anew")
        return Lesson(
            images=part.images.float() / 255,
            masks=part.masks.float(),
            category=part.category,
            noise=part.noise.float(),
            prompts=list(part.texts),
            strength=part.strength,
            located=(part.category == 0).float(),
        )

    def repaired(self, views: Views) -> tuple[Float[Tensor, "m 3 h w"], list[str]]:
        return torch.zeros(0, 3, *views.images.shape[-2:]), []
