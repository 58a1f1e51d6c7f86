"""The contract of a defence: it takes a base, prompts and seeds, and returns an outcome for each prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from PIL import Image

from guardpaint.bases import Base


@dataclass(frozen=True)
class Outcome:
    """What a defence did with one prompt."""

    image: Image.Image | None
    """The released picture; None if nothing was released."""
    status: str
    """plain, clean, repaired, regenerated, blurred, blocked, refused, or released_flagged."""
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Defence(Protocol):
    """A way to draw prompts on a base without showing harm."""

    @property
    def name(self) -> str: ...

    def applies(self, base: Base) -> str:
        """The reason why the defence cannot run on this base; empty if it can."""
        ...

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]: ...


class Everywhere:
    """Mixin for defences that run on every base."""

    def applies(self, base: Base) -> str:
        return ""


def timed(images: Sequence[Image.Image], began: float, status: str = "plain") -> list[Outcome]:
    """Outcomes of the pictures of one batch, which share its time since `began`."""
    spent = (time.perf_counter() - began) / max(1, len(images))
    return [Outcome(i, status, spent) for i in images]
