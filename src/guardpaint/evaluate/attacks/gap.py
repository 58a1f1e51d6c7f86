"""What guided attacks search: a prompt with a gap in place of its forbidden phrase, words for it, and an objective."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from guardpaint.evaluate.attacks.system import Attack
from guardpaint.testbed.language import Attacker, Objective, Span, replaced


@dataclass(frozen=True)
class Gap:
    """A prompt whose forbidden phrase is to be replaced, or to whose end words are added if it has none."""

    prompt: str
    span: Span
    words: Sequence[str]
    """Harmless words to fill the gap with."""
    objective: Objective

    def filled(self, words: Sequence[str]) -> str:
        """The prompt with these words in the gap."""
        return replaced(self.prompt, self.span, " ".join(words))

    def drawn(self, size: int, rng: random.Random) -> list[str]:
        """Random words for the gap."""
        return rng.choices(self.words, k=size)


def gap_of(target: str, attacker: Attacker, words: Sequence[str], wanted: Float[Tensor, " d"] | None = None) -> Gap:
    """The gap of a target prompt; the default objective is to come close to the target itself."""
    prompt, span = attacker.lexicon.lone(target)
    if wanted is None:
        wanted = attacker.surrogate.embed([target])[0]
    return Gap(prompt, span or (len(prompt), len(prompt)), words, Objective(attacker.surrogate, wanted))


@runtime_checkable
class Guided(Attack, Protocol):
    """An attack that maximises an objective on the surrogate by filling a gap."""

    def gap(self, target: str, attacker: Attacker) -> Gap: ...

    def size(self, rng: random.Random) -> int:
        """How many words a random filling has."""
        ...
