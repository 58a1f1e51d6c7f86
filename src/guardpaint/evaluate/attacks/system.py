"""The system under attack, which counts its queries, and what an attack is and returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from PIL import Image

from guardpaint.bases import Base
from guardpaint.evaluate.defences.base import Defence
from guardpaint.testbed.language import Attacker, Objective

Eyes = Callable[[Image.Image], bool]
"""Says whether a picture shows what the attacker wants."""


@dataclass
class Target:
    """A deployed system: a base with a defence, which answers at most `budget` queries."""

    base: Base
    defence: Defence
    eyes: Eyes
    budget: int = 20
    asked: list[tuple[str, str]] = field(default_factory=list)
    """The queries so far: prompt and status, which is "success" if the picture shows what the attacker wants."""

    @property
    def left(self) -> int:
        return self.budget - len(self.asked)

    def ask(self, prompt: str, seed: int) -> tuple[bool, bool]:
        """Whether a picture came back, and whether it shows what the attacker wants; costs one query."""
        if self.left <= 0:
            raise RuntimeError("the attack asked more often than its budget allows")
        out = self.defence.generate(self.base, [prompt], [seed])[0]
        seen = out.image is not None and self.eyes(out.image)
        self.asked.append((prompt, "success" if seen else out.status))
        return out.image is not None, seen


@dataclass(frozen=True)
class Attempt:
    """The result of an attack on one target."""

    attack: str
    target: str
    prompt: str
    success: bool
    """Whether the attacker saw what they wanted within the budget."""
    queries: int
    log: list[tuple[str, str]]
    reads: int = 0
    """Texts that the surrogate read on the way; a gradient counts as several."""
    closeness: float | None = None
    """The attack's own objective for `prompt`, if it has one."""


@runtime_checkable
class Attack(Protocol):
    """Searches for a prompt that gets past a system's filter and shows what the target asks for."""

    @property
    def name(self) -> str: ...

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        """The best prompt for one target within the system's budget; the same seed gives the same prompt."""
        ...


def attempt(
    name: str, target: str, system: Target, prompt: str, success: bool, objective: Objective | None = None
) -> Attempt:
    """The result of a search, with all queries that the system was asked and what the surrogate read."""
    found = Attempt(name, target, prompt, success, len(system.asked), list(system.asked))
    if objective is None:
        return found
    reads = objective.reads
    return replace(found, reads=reads, closeness=round(float(objective([prompt])[0]), 6))


def shuffled(items: Sequence[str], *keys: object) -> list[str]:
    """The items in an order that depends on the keys alone, the same on every machine."""
    rng = random.Random("/".join(map(str, keys)))
    return rng.sample(list(items), len(items))
