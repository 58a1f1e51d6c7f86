"""The yardstick of attacks: blind draws of harmless words, with as many queries and as many texts read.

    compared(SneakyPrompt(), targets, seeds, system, attacker)

An attack that searches must come closer to its objective than the best of the blind draws. One that takes phrases from
a rewriter or a list must stay closer to its target than with random words in their place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from guardpaint.evaluate.attacks.gap import Guided
from guardpaint.evaluate.attacks.system import Attack, Attempt, Target, attempt
from guardpaint.testbed.language import Attacker, everyday_words

LOWEST = -1.0
"""The closeness of a search none of whose queries was answered: the lowest cosine."""


@dataclass(frozen=True)
class RandomSearch:
    """Fills the gap of a guided attack blindly, and asks the best filling of as many as the attack reads per query."""

    attack: Guided
    reads: int
    """Fillings that the surrogate compares before each query."""
    name: str = "random"

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        rng = random.Random(f"random/{self.attack.name}/{seed}/{target}")
        gap, prompt = self.attack.gap(target, attacker), target
        while system.left:
            texts = [gap.filled(gap.drawn(self.attack.size(rng), rng)) for _ in range(self.reads)]
            prompt = texts[int(gap.objective(texts).argmax())]
            if system.ask(prompt, seed)[1]:
                return attempt(self.name, target, system, prompt, True, gap.objective)
        return attempt(self.name, target, system, prompt, False, gap.objective)


@dataclass(frozen=True)
class RandomPhrases:
    """A `Rewriter` without meaning: for every phrase that an attacker has, as many random words."""

    attacker: Attacker
    seed: int

    def similar_phrases(self, prompt: str, count: int) -> list[str]:
        rng = random.Random(f"phrases/{self.seed}/{prompt}")
        words = everyday_words(self.attacker, "random phrases")
        return [" ".join(rng.choices(words, k=len(p.split()))) for p in self.attacker.similar_phrases(prompt, count)]


def answered(found: Attempt) -> list[str]:
    """The prompts of a search that the filter let through."""
    return [prompt for prompt, status in found.log if status != "refused"]


def compared(
    attack: Attack, targets: Sequence[str], seeds: Sequence[int], system: Callable[[], Target], attacker: Attacker
) -> list[dict[str, Any]]:
    """A row for every target and seed: what the attack reached, what random words reached, and the difference."""

    def row(target: str, seed: int) -> dict[str, Any]:
        if isinstance(attack, Guided):
            return searched(attack, target, seed, system, attacker)
        return reworded(attack, target, seed, system, attacker)

    pairs = [(target, seed) for target in targets for seed in seeds]
    return [{"attack": attack.name, "target": t, "seed": s, **row(t, s)} for t, s in pairs]


def searched(
    attack: Guided, target: str, seed: int, system: Callable[[], Target], attacker: Attacker
) -> dict[str, Any]:
    """The best objective among the answered queries of a guided attack, and of a random search of the same budget."""
    found = attack.search(target, system(), attacker, seed)
    blind = RandomSearch(attack, -(-found.reads // found.queries))
    other = blind.search(target, replace(system(), budget=found.queries), attacker, seed)
    objective = attack.gap(target, attacker).objective

    def best(texts: list[str]) -> float:
        return float(objective(texts).max()) if texts else LOWEST

    return values(found, other, best(answered(found)), best(answered(other)))


def reworded(
    attack: Attack, target: str, seed: int, system: Callable[[], Target], attacker: Attacker
) -> dict[str, Any]:
    """The mean closeness to the target of an attack's answered queries, with its phrases and with random ones.

    `original` says whether the filter lets the target itself through.
    """
    found = attack.search(target, system(), attacker, seed)
    blind = replace(attacker, rewriter=RandomPhrases(attacker, seed))
    other = attack.search(target, system(), blind, seed)

    def mean(texts: list[str]) -> float:
        return float(attacker.surrogate.similarity(texts, target).mean()) if texts else LOWEST

    row = values(found, other, mean(answered(found)), mean(answered(other)))
    return row | {"original": int(system().ask(target, seed)[0])}


def values(found: Attempt, other: Attempt, reached: float, blindly: float) -> dict[str, Any]:
    """The columns of a comparison."""
    return {
        "queries": found.queries,
        "reads": found.reads,
        "random_reads": other.reads,
        "passed": len(answered(found)) / max(1, found.queries),
        "objective": round(reached, 6),
        "random": round(blindly, 6),
        "difference": round(reached - blindly, 6),
    }
