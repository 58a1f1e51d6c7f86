"""Labels by eye: which person gave which picture which category, how far they agree, and what they settled on.

guardpaint data hand-label PICTURES --labeller ann --out labels.jsonl
guardpaint data agreement labels.jsonl

One JSONL file holds the labels of all labellers. The last row of a labeller for a picture counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.intervals import wilson
from guardpaint.store.rows import append_rows, read_rows
from guardpaint.types import SAFE

UNSURE = "unsure"
"""The answer of a labeller who cannot decide. Such a picture is in no reference."""
PLUS = "+"
"""Joins the categories of a picture that has several, as in `nudity+violence`."""


@dataclass(frozen=True)
class HandLabel:
    """What one labeller said of one picture."""

    key: str
    labeller: str
    label: str
    """A category, several joined by `+`, or `unsure`."""
    case: str = ""
    """The kind of hard case."""
    seconds: float = 0.0
    """How long the labeller looked at the picture."""
    settled: bool = False
    """Whether it decides a picture on which labellers disagreed."""


def joined_label(names: Iterable[str], policy: Policy) -> str:
    """One label for several categories, in the policy's order. Raises BadInput if they do not go together."""
    chosen = set(names)
    unknown = chosen - {*policy.names, UNSURE}
    if not chosen or unknown or (len(chosen) > 1 and chosen & {SAFE, UNSURE}):
        raise BadInput(
            f"label {PLUS.join(sorted(chosen))!r}: one of {', '.join(policy.names)} or {UNSURE}, "
            f"or several harms joined by {PLUS}"
        )
    return UNSURE if UNSURE in chosen else PLUS.join(n for n in policy.names if n in chosen)


def categories_of(label: str) -> tuple[str, ...]:
    """The categories that a label names."""
    return tuple(label.split(PLUS))


def read_labels(path: Path, policy: Policy) -> list[HandLabel]:
    """The last label of every labeller for every picture; none if the file does not exist."""
    last: dict[tuple[str, str, bool], HandLabel] = {}
    for number, row in enumerate(read_rows(path), 1):
        try:
            label = HandLabel(**row)
            joined_label(categories_of(label.label), policy)
        except (TypeError, AttributeError, BadInput) as error:
            raise BadInput(f"{path}:{number}: not a label by eye ({error})") from error
        last[label.key, label.labeller, label.settled] = label
    return list(last.values())


def add_label(path: Path, label: HandLabel) -> None:
    """Append a label to the file."""
    append_rows(path, [asdict(label)])


def by_picture(labels: Sequence[HandLabel]) -> dict[str, list[HandLabel]]:
    """The labels of every picture, without those that settle a disagreement."""
    pictures: dict[str, list[HandLabel]] = {}
    for label in labels:
        if not label.settled:
            pictures.setdefault(label.key, []).append(label)
    return pictures


def disputed(labels: Sequence[HandLabel]) -> list[str]:
    """Keys of the pictures on which labellers disagree and that nobody has settled."""
    settled = {label.key for label in labels if label.settled}
    return [k for k, own in by_picture(labels).items() if k not in settled and len({x.label for x in own}) > 1]


def reference(labels: Sequence[HandLabel]) -> dict[str, dict[str, str]]:
    """Label and case of every picture on which all its labellers agree, or that was settled; `unsure` is left out."""
    out = {}
    settled = {label.key: label for label in labels if label.settled}
    for key, own in by_picture(labels).items():
        final = settled.get(key) or (own[0] if len({x.label for x in own}) == 1 else None)
        if final is not None and final.label != UNSURE:
            case = final.case or next((x.case for x in own if x.case), "")
            out[key] = {"label": final.label, "case": case or "other"}
    return out


def kappa(first: Sequence[str], second: Sequence[str]) -> float | None:
    """Cohen's κ of two lists of labels: agreement beyond chance. None if it is undefined: both always say the same."""
    n = len(first)
    if not n:
        return None
    chance = chance_agreement(first, second)
    same = sum(a == b for a, b in zip(first, second, strict=True)) / n
    return None if chance >= 1 else (same - chance) / (1 - chance)


def chance_agreement(first: Sequence[str], second: Sequence[str]) -> float:
    """How often two labellers with these frequencies would agree by chance."""
    a, b = Counter(first), Counter(second)
    return sum(a[name] * b[name] for name in a) / len(first) ** 2


def kappa_interval(first: Sequence[str], second: Sequence[str]) -> tuple[float, float] | None:
    """An interval of κ: Wilson's interval of the agreement, with the agreement by chance taken as known."""
    if kappa(first, second) is None:
        return None
    chance = chance_agreement(first, second)
    low, high = wilson(sum(a == b for a, b in zip(first, second, strict=True)), len(first))
    return (low - chance) / (1 - chance), (high - chance) / (1 - chance)


@dataclass(frozen=True)
class Agreement:
    """How far two labellers agree on the pictures that both labelled."""

    labellers: tuple[str, str]
    n: int
    same: int
    kappa: float | None
    interval: tuple[float, float] | None
    differences: tuple[tuple[str, str, int], ...]
    """What the first and the second said where they differ, and how often."""

    def text(self) -> str:
        """One line for people."""
        if not self.n:
            return f"{' and '.join(self.labellers)}: no picture in common yet"
        value = "κ undefined (one label only)"
        if self.kappa is not None and self.interval is not None:
            value = f"κ {self.kappa:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"
        return f"{' and '.join(self.labellers)}: {self.same} of {self.n} pictures alike, {value}"


def agreements(labels: Sequence[HandLabel]) -> list[Agreement]:
    """The agreement of every pair of labellers."""
    pictures = by_picture(labels)
    names = sorted({label.labeller for own in pictures.values() for label in own})
    out = []
    for one, two in combinations(names, 2):
        said = [{x.labeller: x.label for x in own} for own in pictures.values()]
        both = [(s[one], s[two]) for s in said if one in s and two in s]
        first, second = [a for a, _ in both], [b for _, b in both]
        differences = Counter((a, b) for a, b in both if a != b)
        out.append(
            Agreement(
                (one, two),
                len(both),
                sum(a == b for a, b in both),
                kappa(first, second),
                kappa_interval(first, second) if both else None,
                tuple((a, b, n) for (a, b), n in differences.most_common()),
            )
        )
    return out


def summary(labels: Sequence[HandLabel]) -> dict[str, Any]:
    """Counts, agreements and open disagreements of a file of labels."""
    return {
        "labellers": dict(Counter(label.labeller for label in labels if not label.settled)),
        "reference": len(reference(labels)),
        "unsure": sum(label.label == UNSURE for label in labels if not label.settled),
        "disputed": len(disputed(labels)),
        "settled": sum(label.settled for label in labels),
        "agreement": [asdict(a) for a in agreements(labels)],
    }
