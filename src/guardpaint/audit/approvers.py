"""Approvers: who looks at a finished picture before it is released, and took no part in choosing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.contract import checked_approval, checked_audits
from guardpaint.audit.ensemble import EnsembleSettings, hottest, union, worst
from guardpaint.audit.levels import audit_scores, checked_levels, graded, harm_scores
from guardpaint.audit.members import digests, move, open_members, save_members
from guardpaint.audit.part import Graded, digest_of, read_card, settings_from
from guardpaint.audit.tiles import bounded, cut, lowered, merged
from guardpaint.draft.codec import audit_size, resize
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.folders import resolve
from guardpaint.types import SAFE, Approval, Approver, Audit, Auditor, TileAudit

TILE_BATCH = 16
C = TypeVar("C", bound="Composed")


class Composed(Graded):
    """An approver that is made of other parts, kept in numbered subfolders."""

    members: tuple[Any, ...]
    role: ClassVar[str] = "approver"

    @property
    def name(self) -> str:
        return f"{self.kind} of {', '.join(title(m) for m in self.members)}"

    def save_pretrained(self, folder: Path) -> None:
        save_members(self.role, self, self.members, folder)

    @classmethod
    def opened(cls, folder: str | Path, count: int | None = None) -> tuple[list[Any], dict[str, Any]]:
        """The members and the options of the part in a folder."""
        place = resolve(folder)
        members = open_members(cls.role, cls.kind, place)
        if count is not None and len(members) != count:
            raise BadCheckpoint(f"{folder}: a {cls.kind} has {count} member(s), not {len(members)}")
        return members, read_card(place, cls.kind)

    def digest(self) -> str:
        """SHA-256 over the members' digests and the options."""
        return digest_of(self, *digests(self.members))

    def to(self: C, device: Any) -> C:
        move(self.members, device)
        return self


def title(part: Any) -> str:
    """What a part is called in an approval: its name, its kind, or its class."""
    return str(getattr(part, "name", None) or getattr(part, "kind", None) or type(part).__name__)


@dataclass(frozen=True)
class SecondLookSettings:
    """How a second look sees a picture."""

    levels: Mapping[str, float] = field(default_factory=dict)
    tiles: int | None = None
    """Side of the squares that a larger picture is also seen in; none looks at the whole picture only."""
    tile_offset: float = 0.0
    """By how many logits the scores of tiles are lowered."""

    def __post_init__(self) -> None:
        if self.tiles is not None and self.tiles < 16:
            raise BadConfig(f"tiles={self.tiles}: at least 16 pixels a side")
        if not 0 <= self.tile_offset <= 20:
            raise BadConfig(f"tile_offset={self.tile_offset}: between 0 and 20 logits")


class SecondLook(Composed):
    """Any auditor as an approver: it audits the finished picture at its fine size, and in tiles if asked to."""

    kind: ClassVar[str] = "second-look"
    role: ClassVar[str] = "auditor"

    def __init__(self, auditor: Auditor, settings: SecondLookSettings | None = None) -> None:
        self.auditor, self.settings, self.members = auditor, settings or SecondLookSettings(), (auditor,)
        self.categories: tuple[str, ...] = tuple(auditor.categories)
        checked_levels(self.settings.levels, self.categories)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> SecondLook:
        members, saved = cls.opened(folder, 1)
        return cls(members[0], settings_from(SecondLookSettings, {**saved, **options}, cls.kind))

    def approve(self, image: Float[Tensor, "3 h w"], prompt: str | None, edited: bool) -> Approval:
        audit = self.look(image.float(), prompt)
        return Approval(graded(audit_scores(audit), self.levels), self.name, audit.adv_map.cpu())

    def look(self, image: Float[Tensor, "3 h w"], prompt: str | None) -> Audit:
        """The audit of the whole picture, and of its tiles."""
        size, pixels = (int(image.shape[-2]), int(image.shape[-1])), self.auditor.sizes[1]
        whole = self.audits(resize(image[None], audit_size(*size, pixels)), prompt)[0]
        views: list[TileAudit] = []
        shown, squares = (size, ()) if self.settings.tiles is None else bounded(size, self.settings.tiles)
        source = resize(image[None], shown)[0]
        offset = self.settings.tile_offset
        for start in range(0, len(squares), TILE_BATCH):
            some = squares[start : start + TILE_BATCH]
            batch = torch.stack([cut(source, square, pixels) for square in some])
            audits = self.audits(batch, prompt)
            views += [TileAudit(s, lowered(a, offset), offset) for s, a in zip(some, audits, strict=True)]
        return merged(whole, views, shown) if views else whole

    def audits(self, views: Float[Tensor, "b 3 h w"], prompt: str | None) -> list[Audit]:
        """One checked pass of the auditor over views of a finished picture."""
        prompts = [prompt] * len(views)
        return checked_audits(self.auditor.audit(views, prompts, 0.0), self.auditor, prompts)


class ApproverEnsemble(Composed):
    """Approvers as one: all are asked, and for every category the worst answer counts."""

    kind: ClassVar[str] = "ensemble"

    def __init__(self, members: Sequence[Approver], settings: EnsembleSettings | None = None) -> None:
        self.members, self.settings = tuple(members), settings or EnsembleSettings()
        self.categories: tuple[str, ...] = union(self.members)
        checked_levels(self.settings.levels, self.categories)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> ApproverEnsemble:
        members, saved = cls.opened(folder)
        return cls(members, settings_from(EnsembleSettings, {**saved, **options}, cls.kind))

    def approve(self, image: Float[Tensor, "3 h w"], prompt: str | None, edited: bool) -> Approval:
        answers = [checked_approval(m.approve(image, prompt, edited), m, title(m)) for m in self.members]
        scores = worst((harm_scores(a.probs) for a in answers), self.categories)
        strictest = min(answers, key=lambda a: a.probs[SAFE])
        maps = [a.heat for a in answers if a.heat is not None]
        return Approval(graded(scores, self.levels), strictest.by, hottest(maps) if maps else None)


@dataclass(frozen=True)
class CascadeSettings:
    """When the dear approver is asked."""

    levels: Mapping[str, float] = field(default_factory=dict)
    band: tuple[float, float] = (0.05, 0.9)
    """Probabilities of harm at which the cheap approver is unsure, both ends included."""

    def __post_init__(self) -> None:
        if len(self.band) != 2 or not 0 <= self.band[0] <= self.band[1] <= 1:
            raise BadConfig(f"band={self.band}: two probabilities, ascending")


class Cascade(Composed):
    """A cheap approver for every picture, and a dear one where the cheap one is unsure or the picture was edited.

    Above the band the cheap one has decided against the picture, edited or not. Where the dear one is asked, its
    answer counts for every category that it covers.
    """

    kind: ClassVar[str] = "cascade"

    def __init__(self, cheap: Approver, dear: Approver, settings: CascadeSettings | None = None) -> None:
        self.cheap, self.dear, self.members = cheap, dear, (cheap, dear)
        self.settings = settings or CascadeSettings()
        self.categories: tuple[str, ...] = tuple(cheap.categories)
        unseen = [c for c in dear.categories if c not in cheap.categories]
        if unseen:
            raise BadConfig(
                f"cascade: only the dear approver covers {', '.join(unseen)}, and it is not asked about every picture; "
                "take an ensemble"
            )
        checked_levels(self.settings.levels, self.categories)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Cascade:
        members, saved = cls.opened(folder, 2)
        return cls(members[0], members[1], settings_from(CascadeSettings, {**saved, **options}, cls.kind))

    def approve(self, image: Float[Tensor, "3 h w"], prompt: str | None, edited: bool) -> Approval:
        first = checked_approval(self.cheap.approve(image, prompt, edited), self.cheap, title(self.cheap))
        low, high = self.settings.band
        unsafe = 1 - first.probs[SAFE]
        if unsafe > high or (unsafe < low and not edited):
            return Approval(graded(harm_scores(first.probs), self.levels), first.by, first.heat)
        second = checked_approval(self.dear.approve(image, prompt, edited), self.dear, title(self.dear))
        scores = {**harm_scores(first.probs), **harm_scores(second.probs)}
        heat = first.heat if second.heat is None else second.heat
        return Approval(graded(scores, self.levels), second.by, heat)
