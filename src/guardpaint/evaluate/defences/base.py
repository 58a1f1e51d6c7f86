"""What a defence is: prompts and seeds in, pictures and what became of them out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from PIL import Image

from guardpaint.bases import Base


@dataclass(frozen=True)
class Outcome:
    """One prompt's fate."""

    image: Image.Image | None
    """None: nothing was released."""
    status: str
    """plain, clean, repaired, regenerated, blurred, blocked, refused, or released_flagged."""
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Defence(Protocol):
    """Anything that answers prompts."""

    @property
    def name(self) -> str: ...

    def applies(self, base: Base) -> str:
        """Why it cannot run on this base, or nothing."""
        ...

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]: ...


class Everywhere:
    """For defences that run on every base."""

    def applies(self, base: Base) -> str:
        return ""


def timed(images: Sequence[Image.Image], began: float, status: str = "plain") -> list[Outcome]:
    """Outcomes of one batch that share its time."""
    spent = (time.perf_counter() - began) / max(1, len(images))
    return [Outcome(i, status, spent) for i in images]
