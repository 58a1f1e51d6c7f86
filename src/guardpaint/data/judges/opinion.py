"""The contract of a judge, and what one says of a picture."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from PIL import Image

from guardpaint.policy import Policy
from guardpaint.types import SAFE

UNNAMED = "unsafe"
"""What a judge says of a harm for which the policy has no name."""


class JudgeFailed(RuntimeError):
    """The judge's answer could not be read; `raw` is the answer, as far as there is one."""

    def __init__(self, message: str, raw: str = "") -> None:
        super().__init__(message)
        self.raw = raw


@dataclass(frozen=True)
class Opinion:
    """What a judge says of one picture."""

    said: str
    """The category: `safe`, a harm of the policy, or `unsafe` for a harm that the policy does not name."""
    right: Mapping[str, bool] = field(default_factory=dict)
    """For each requested attribute that was judged: whether it is present."""
    raw: str = ""
    """The answer as it was given."""
    harm: float | None = None
    """How unsafe the picture is, from 0 to 1, if the judge can tell."""


@runtime_checkable
class Judge(Protocol):
    """Decides what a picture shows."""

    attributes: bool
    """Whether it also judges which attributes are present."""

    @property
    def identity(self) -> str:
        """Everything that determines its verdicts, as text; cached rows are keyed by it."""
        ...

    def verdict(self, image: Image.Image, asked: Mapping[str, str]) -> tuple[str, dict[str, bool]]:
        """The category, and for each attribute in `asked` that it can judge, whether it is present."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A judge that also gives its raw answer."""

    def opinion(self, image: Image.Image) -> Opinion:
        """What it says of a picture; raises JudgeFailed if its answer cannot be read."""
        ...


class Explained(ABC):
    """Base of judges that judge no attributes: the verdict is that of their opinion."""

    attributes: bool = False

    @abstractmethod
    def opinion(self, image: Image.Image) -> Opinion:
        """What it says of a picture; raises JudgeFailed if its answer cannot be read."""

    def verdict(self, image: Image.Image, asked: Mapping[str, str]) -> tuple[str, dict[str, bool]]:
        return self.opinion(image).said, {}


def opinion_of(judge: Judge, image: Image.Image, asked: Mapping[str, str]) -> Opinion:
    """The opinion of any judge; one that does not explain itself gives no raw answer."""
    if isinstance(judge, Explains):
        return judge.opinion(image)
    said, right = judge.verdict(image, asked)
    return Opinion(said, right)


def shows_harm(judge: Judge, image: Image.Image) -> bool:
    """Whether the judge finds harm in a picture; an unreadable answer counts as no."""
    try:
        return judge.verdict(image.convert("RGB"), {})[0] != SAFE
    except JudgeFailed:
        return False


def worst_harm(harms: Mapping[str, float], level: float, raw: str) -> Opinion:
    """The opinion of a judge with a score for each harm: the highest one counts if it reaches the level."""
    if not harms or not all(math.isfinite(p) and 0 <= p <= 1 for p in harms.values()):
        raise JudgeFailed(f"scores outside [0, 1]: {dict(harms)}", raw)
    worst = max(harms, key=harms.__getitem__)
    return Opinion(worst if harms[worst] >= level else SAFE, raw=raw, harm=harms[worst])


def named_by(policy: Policy, *names: str) -> str:
    """The first of these names that is a harm of the policy; `unsafe` if none is."""
    return next((n for n in names if n in policy.names and n != SAFE), UNNAMED)
