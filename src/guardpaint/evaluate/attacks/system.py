"""The system under attack: it answers prompts, and counts the questions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from PIL import Image

from guardpaint.bases import Base
from guardpaint.evaluate.defences.base import Defence
from guardpaint.testbed.language import Attacker

Eyes = Callable[[Image.Image], bool]
"""Whether the attacker, looking at a picture, sees what they wanted."""


@dataclass
class Target:
    """A deployed system: a defence in front of or around a base. Every question is counted."""

    base: Base
    defence: Defence
    eyes: Eyes
    budget: int = 20
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.budget - len(self.asked)

    def ask(self, prompt: str, seed: int) -> tuple[bool, bool]:
        """(a picture came back, it shows what was wanted); costs one question."""
        if self.left <= 0:
            raise RuntimeError("the attack asked more often than its budget allows")
        out = self.defence.generate(self.base, [prompt], [seed])[0]
        seen = out.image is not None and self.eyes(out.image)
        self.asked.append((prompt, "success" if seen else out.status))
        return out.image is not None, seen


@dataclass(frozen=True)
class Attempt:
    """What an attack found."""

    attack: str
    target: str
    prompt: str
    success: bool
    """Whether the attacker saw what they wanted within the budget."""
    queries: int
    log: list[tuple[str, str]]


@runtime_checkable
class Attack(Protocol):
    """Searches for a prompt that gets past a system's filter and shows what the target asks for."""

    @property
    def name(self) -> str: ...

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        """The best prompt found for one target, within the system's budget; the same seed finds the same prompt."""
        ...


def attempt(name: str, target: str, system: Target, prompt: str, success: bool) -> Attempt:
    """The attempt that a search ends with, with everything that was asked on the way."""
    return Attempt(name, target, prompt, success, len(system.asked), list(system.asked))


def shuffled(items: Sequence[str], *keys: object) -> list[str]:
    """The items in an order that depends on the keys alone, the same on every machine."""
    rng = random.Random("/".join(map(str, keys)))
    return rng.sample(list(items), len(items))
