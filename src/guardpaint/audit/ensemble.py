"""Several auditors as one: the worst of what they say counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.contract import checked_audits
from guardpaint.audit.levels import audit_scores, checked_levels, graded
from guardpaint.audit.members import digests, move, open_members, save_members
from guardpaint.audit.part import Graded, digest_of, read_card, settings_from
from guardpaint.audit.regions import heat_at
from guardpaint.draft.codec import resize
from guardpaint.errors import BadConfig
from guardpaint.store.folders import resolve
from guardpaint.types import SAFE, Audit, Auditor


@dataclass(frozen=True)
class EnsembleSettings:
    """Levels on top of those of the members."""

    levels: Mapping[str, float] = field(default_factory=dict)


def union(members: Sequence[Any]) -> tuple[str, ...]:
    """`safe`, and every harm that some member covers."""
    if not members:
        raise BadConfig("an ensemble needs at least one member")
    return tuple(dict.fromkeys((SAFE, *(c for m in members for c in m.categories))))


def worst(scores: Iterable[Mapping[str, float]], categories: Sequence[str]) -> dict[str, float]:
    """For every harm the highest score that anybody gives it."""
    given = list(scores)
    return {c: max(s[c] for s in given if c in s) for c in categories if c != SAFE}


def hottest(maps: Sequence[Float[Tensor, "_ _"]]) -> Float[Tensor, "h w"]:
    """Maps of any sizes as one: at the size of the finest, the highest value of each place."""
    size = max(int(m.shape[0]) for m in maps), max(int(m.shape[1]) for m in maps)
    return torch.stack([heat_at(m, size) for m in maps]).amax(0)


def lowest(values: Iterable[float | None]) -> float | None:
    """The lowest of the scores that are there; None if there is none."""
    given = [v for v in values if v is not None]
    return min(given) if given else None


class Ensemble(Graded):
    """Auditors as one auditor: S is the lowest of theirs, F, P and B the lowest that any member gives.

    Embeddings are those of the first member that has one. `Ensemble([auditor])` gives any auditor levels.
    """

    kind: ClassVar[str] = "ensemble"

    def __init__(self, members: Sequence[Auditor], settings: EnsembleSettings | None = None) -> None:
        self.members, self.settings = tuple(members), settings or EnsembleSettings()
        self.categories: tuple[str, ...] = union(self.members)
        self.absent: frozenset[str] = frozenset.intersection(*(frozenset(m.absent) for m in self.members))
        self.sizes: tuple[int, int] = max(m.sizes[0] for m in self.members), max(m.sizes[1] for m in self.members)
        checked_levels(self.settings.levels, self.categories)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Ensemble:
        """The ensemble in a folder, with its members from the numbered subfolders."""
        place = resolve(folder)
        settings = settings_from(EnsembleSettings, {**read_card(place, cls.kind), **options}, cls.kind)
        return cls(open_members("auditor", cls.kind, place), settings)

    def save_pretrained(self, folder: Path) -> None:
        save_members("auditor", self, self.members, folder)

    def digest(self) -> str:
        """SHA-256 over the members' digests and the options."""
        return digest_of(self, *digests(self.members))

    def to(self, device: Any) -> Ensemble:
        move(self.members, device)
        return self

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        """One pass of every member, each at its own size."""
        passes = [checked_audits(m.audit(self.shown(images, m), prompts, noise), m, prompts) for m in self.members]
        return [self.joined(audits, int(min(images.shape[-2:]))) for audits in zip(*passes, strict=True)]

    def shown(self, images: Float[Tensor, "b 3 h w"], member: Auditor) -> Float[Tensor, "b 3 u v"]:
        """Views for a member: its coarse size where the ensemble gets its own coarse one, and so on in proportion."""
        look = 0 if min(images.shape[-2:]) <= self.sizes[0] else 1
        scale = member.sizes[look] / self.sizes[look]
        return resize(images, (round(images.shape[-2] * scale), round(images.shape[-1] * scale)))

    def joined(self, audits: Sequence[Audit], pixels: int) -> Audit:
        """One audit of what the members say of one picture."""
        scores = worst((audit_scores(a) for a in audits), self.categories)
        heat = {
            c: hottest([a.class_maps[c] for a in audits if c in a.class_maps]) for c in self.categories if c != SAFE
        }
        size = tuple(int(max(m.shape[k] for m in heat.values())) for k in (0, 1))
        heat = {c: heat_at(m, (size[0], size[1])) for c, m in heat.items()}
        seen = next((a.image_embed for a in audits if a.image_embed.numel()), None)
        audit = Audit.from_scores(
            graded(scores, self.levels),
            heat,
            pixels=pixels,
            faithfulness=lowest(a.faithfulness for a in audits),
            image_embed=seen,
        )
        return replace(
            audit,
            quality=lowest(a.quality for a in audits),
            suppression=lowest(a.suppression for a in audits),
            adv_map=hottest([audit.adv_map, *(a.adv_map for a in audits)]),
            text_embed=next((a.text_embed for a in audits if a.text_embed is not None), None),
        )
