"""Levels of a guard's auditor and approver, set on pictures of one's own (`guardpaint calibrate --pictures`).

Harmless pictures bound false alarms, labelled harmful ones bound misses; both bounds are conformal. Pictures in one
subfolder, such as crops of one photograph, count as one: the worst of them decides. A picture is scored as the guard's
verdict on a finished picture scores it: at the fine size and, if it is larger than the guard's scope, in tiles too.

The bounds hold for each category of each part by itself. How often the whole guard flags a harmless picture, which is
what users notice, is measured with the new levels and recorded beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from guardpaint.audit.calibration import needed
from guardpaint.config import Band, Calibration
from guardpaint.draft.loading import chosen_device
from guardpaint.draft.options import LoadOptions
from guardpaint.errors import BadInput
from guardpaint.evaluate.statistics import share
from guardpaint.guard import MANIFEST, GuardPaint
from guardpaint.parts.folder import own_folder
from guardpaint.store.checkpoint import read_json, sha256_hex, write_json
from guardpaint.store.images import as_rgb, from_pil, load_image
from guardpaint.store.progress import track
from guardpaint.types import SAFE, JsonDict

KEPT = "picture_calibration.json"
"""File in the guard's folder: the publishers' levels, those chosen, and the rates behind them."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
EXTREME = 1e-9


@runtime_checkable
class Graded(Protocol):
    """A part with a level for each category that it covers: the raw score from which on it flags a picture."""

    categories: tuple[str, ...]

    @property
    def levels(self) -> dict[str, float]: ...
    def with_levels(self, levels: Mapping[str, float]) -> Any: ...


@dataclass(frozen=True)
class Goals:
    """What is asked of the levels."""

    alarms: float = 0.05
    """Largest share of harmless pictures that may be flagged."""
    misses: float = 0.10
    """Largest share of a category's harmful pictures that may pass."""
    may_rise: bool = False
    """Whether a level may rise above its publisher's without harmful pictures to measure misses on."""


@dataclass(frozen=True)
class Chosen:
    """The level of one category of one part, and why."""

    level: float
    published: float
    why: str
    alarms: JsonDict
    misses: JsonDict | None


@dataclass(frozen=True)
class Levels:
    """The levels that were chosen for a guard, and what they do."""

    parts: Mapping[str, Mapping[str, Chosen]]
    """By role and category."""
    alarms: JsonDict
    """Share of the harmless pictures or groups that the whole guard flags, auditor or approver."""


# Arithmetic --------------------------------------------------------------------------------------------------


def logit(p: float) -> float:
    p = min(max(p, EXTREME), 1 - EXTREME)
    return math.log(p / (1 - p))


def raw_scores(probs: Mapping[str, float], levels: Mapping[str, float]) -> dict[str, float]:
    """The raw score of each category with a level, from probabilities in which a raw score at its level is 0.5.

    Harms share their largest p in proportion, so p_c = (1 − p_safe) · share_c / max share.
    """
    harms = {c: probs[c] for c in levels}
    largest = max(harms.values())
    worst = 1 - probs[SAFE]
    each = {c: worst * p / largest if largest > 0 else 0.0 for c, p in harms.items()}
    return {c: 1 / (1 + math.exp(-(logit(p) + logit(levels[c])))) for c, p in each.items()}


def alarm_level(scores: Sequence[float], alarms: float) -> float:
    """The lowest level with (harmless scores at or above it + 1) / (n + 1) ≤ alarms.

    Of 0.1, 0.2, 0.3 and 0.9 with alarms 0.4, one may be flagged ((1 + 1) / 5): the level lies just above 0.3.
    """
    refuse_few(len(scores), alarms, "harmless")
    allowed = math.floor(alarms * (len(scores) + 1) + 1e-9) - 1
    return float(np.nextafter(sorted(scores, reverse=True)[allowed], 2.0))


def miss_level(scores: Sequence[float], misses: float, category: str) -> float:
    """The highest level with (harmful scores below it + 1) / (n + 1) ≤ misses.

    Of 0.1, 0.6, 0.8 and 0.9 with misses 0.4, one may pass: the level is 0.6.
    """
    refuse_few(len(scores), misses, category)
    allowed = math.floor(misses * (len(scores) + 1) + 1e-9) - 1
    return float(sorted(scores)[allowed])


def refuse_few(count: int, share_: float, what: str) -> None:
    """Raise BadInput if a bound cannot be promised with so few pictures."""
    if count < needed(share_):
        raise BadInput(
            f"{count} {what} pictures or groups: a share of at most {share_:g} needs at least {needed(share_)}; add "
            "pictures, or ask for a larger share"
        )


def choose(
    harmless: Sequence[float], harmful: Sequence[float], published: float, goals: Goals, category: str
) -> tuple[float, str]:
    """The level of a category and why. Without harmful pictures it never rises above the publisher's by itself."""
    quiet = alarm_level(harmless, goals.alarms)
    if harmful:
        safe = miss_level(harmful, goals.misses, category)
        if quiet <= safe:
            return quiet, "meets the bound on false alarms and the one on misses"
        return safe, "meets the bound on misses; the one on false alarms cannot be met with it"
    if quiet <= published:
        return quiet, "meets the bound on false alarms, at or below the publisher's level"
    if goals.may_rise:
        return quiet, "raised above the publisher's level to meet the bound on false alarms; misses are not measured"
    return published, "the publisher's level; the bound on false alarms would need a higher one"


# Pictures ----------------------------------------------------------------------------------------------------


def grouped(folder: Path) -> dict[str, list[Path]]:
    """The pictures of a folder by group: a subfolder is a group, and so is a picture that lies in none."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: no folder of pictures")
    found: dict[str, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES):
        inside = path.relative_to(folder)
        found.setdefault(inside.parts[0], []).append(path)
    if not found:
        raise BadInput(f"{folder}: holds no pictures ({', '.join(SUFFIXES)})")
    return found


def labelled(folder: Path, categories: Sequence[str]) -> dict[str, dict[str, list[Path]]]:
    """Harmful pictures by category: one subfolder for each, named like it."""
    if not folder.is_dir():
        raise BadInput(f"{folder}: no folder of labelled pictures")
    named = sorted(p.name for p in folder.iterdir() if p.is_dir())
    unknown = [n for n in named if n not in categories or n == SAFE]
    if unknown or not named:
        harms = ", ".join(c for c in categories if c != SAFE)
        raise BadInput(f"{folder}: subfolders {', '.join(unknown) or 'missing'}; name one for each category: {harms}")
    return {name: grouped(folder / name) for name in named}


def scored(guard: GuardPaint, role: str, groups: Mapping[str, list[Path]], what: str) -> Iterator[dict[str, float]]:
    """The highest raw scores that a part of the guard gives the pictures of each group."""
    levels = getattr(guard.parts, role).levels
    for paths in track(groups.values(), f"scoring {what}", len(groups)):
        rows = [raw_scores(probs, levels) for path in paths for probs in views_of(guard, role, opened(path))]
        yield {c: max(row[c] for row in rows) for c in rows[0]}


def opened(path: Path) -> Tensor:
    return from_pil(as_rgb(load_image(path)))


@torch.no_grad()
def views_of(guard: GuardPaint, role: str, image: Tensor) -> list[Mapping[str, float]]:
    """The probabilities that a part gives a finished picture: of the auditor those of every view that decides.

    An approver that looks at tiles merges them itself.
    """
    if role == "approver":
        return [guard.parts.approval(image, None, False)[0].probs]
    audit = guard.audit_image(image)
    return [view.audit.probs for view in audit.tiles] or [audit.probs]


@torch.no_grad()
def flagged(guard: GuardPaint, groups: Mapping[str, list[Path]]) -> list[bool]:
    """Whether the guard finds anything in a picture of each group."""

    def found(image: Tensor) -> bool:
        return guard.finding(image, guard.audit_image(image)) is not None

    whole = track(groups.values(), "checking the whole guard", len(groups))
    return [any(found(opened(path)) for path in paths) for paths in whole]


# The command -------------------------------------------------------------------------------------------------


def run(folder: Path, pictures: Path, unsafe: Path | None, goals: Goals, device: str | None = None) -> Levels:
    """Set the levels of a guard's auditor and approver, write them into its folder and return them."""
    own_folder(folder)
    harmless = grouped(pictures)
    guard = GuardPaint.from_pretrained(folder).to(chosen_device(LoadOptions(device=device)))
    kept = read_json(folder / KEPT) if (folder / KEPT).exists() else {}
    harmful = labelled(unsafe, guard.policy.names) if unsafe is not None else {}
    found: dict[str, dict[str, Chosen]] = {}
    for role in ("auditor", "approver"):
        part = getattr(guard.parts, role)
        if isinstance(part, Graded):
            published = kept.get(role, {}).get("published", dict(part.levels))
            found[role] = levels_of(guard, role, published, harmless, harmful, goals)
    if not found:
        raise BadInput(
            f"{folder}: neither auditor nor approver has levels; an auditor that was trained here is calibrated on "
            "views (--auditor, --views)"
        )
    guard.parts = replace(guard.parts, **{role: regraded(guard, role, chosen) for role, chosen in found.items()})
    levels = Levels(found, share(flagged(guard, harmless), None))
    write(folder, guard, levels, goals, harmful)
    return levels


def regraded(guard: GuardPaint, role: str, chosen: Mapping[str, Chosen]) -> Any:
    """A part of the guard under its new levels."""
    return getattr(guard.parts, role).with_levels({c: one.level for c, one in chosen.items()})


def levels_of(
    guard: GuardPaint,
    role: str,
    published: Mapping[str, float],
    harmless: Mapping[str, list[Path]],
    harmful: Mapping[str, Mapping[str, list[Path]]],
    goals: Goals,
) -> dict[str, Chosen]:
    """The chosen level of every category that a part covers."""
    part: Graded = getattr(guard.parts, role)
    calm = list(scored(guard, role, harmless, "harmless pictures"))
    result = {}
    for category in (c for c in part.categories if c != SAFE):
        quiet = [row[category] for row in calm]
        own = harmful.get(category, {})
        loud = [row[category] for row in scored(guard, role, own, category)] if own else []
        level, why = choose(quiet, loud, published[category], goals, category)
        result[category] = Chosen(
            level,
            published[category],
            why,
            share([s >= level for s in quiet], f"<={goals.alarms}"),
            share([s < level for s in loud], f"<={goals.misses}") if loud else None,
        )
    return result


def write(
    folder: Path, guard: GuardPaint, found: Levels, goals: Goals, harmful: Mapping[str, Mapping[str, list[Path]]]
) -> None:
    """Write the levels into the manifest and the rates beside it.

    Where every category of the auditor was measured on harm, the guard counts as calibrated for finished pictures:
    the same levels judge views in the loop, which nobody has scored here.
    """
    manifest = read_json(folder / MANIFEST)
    record: JsonDict = {"alarms": goals.alarms, "misses": goals.misses, "guard": {"alarms": found.alarms}}
    for role, chosen in found.parts.items():
        levels = {c: one.level for c, one in chosen.items()}
        manifest["parts"][role]["options"]["levels"] = levels
        record[role] = {
            "published": {c: one.published for c, one in chosen.items()},
            "levels": levels,
            "categories": {c: {"why": o.why, "alarms": o.alarms, "misses": o.misses} for c, o in chosen.items()},
        }
    auditor = found.parts.get("auditor", {})
    if auditor and all(one.misses is not None for one in auditor.values()):
        part: Any = guard.parts.auditor
        counts = {c: len(harmful[c]) for c in auditor}
        band = Band(0.0, {}, None, counts)
        data = sha256_hex("\n".join(str(p) for groups in harmful.values() for g in groups.values() for p in g))
        calibration = Calibration(goals.misses, 0.5, data, (band,), part.digest(), finished_only=True)
        manifest["config"]["calibration"] = calibration.to_dict()
    write_json(folder / KEPT, record)
    write_json(folder / MANIFEST, manifest)
